#!/usr/bin/env bash
# compute_sanitizer.sh BUILD_DIR: runs the checkers of compute-sanitizer over a few small cases of
# every CUDA row and prints the number of reports of each. Needs a GPU and a Release build. Exit
# code 1 when anything is reported, a case fails, or a row has no case.
set -eu
program=$1/bin/marlin_conformance
logs=$1/compute_sanitizer
if ! command -v compute-sanitizer >/dev/null; then
  echo "compute-sanitizer: not found" >&2
  exit 2
fi
mkdir -p "$logs"

# Shapes that gpu_cases.cc gives to every format; the first two are for kernels of few rows.
shapes='m2_n33_k144|m8_n64_k128|m17_n40_k96|m65_n72_k160|m1_n40_k96|m1_n72_k160'
cases() { echo "^(gemm|dequantize)/(fp4_e2m1|u4|s8|bf16)/cuda/$1/($shapes)_g[0-9]+/"; }

# Tells whether there is a device, and that all is well without a checker.
"$program" --device cuda --filter "$(cases '[a-z0-9_]+')" >"$logs/plain.log" || {
  tail -n 20 "$logs/plain.log"
  exit 1
}
if grep '^skipped: no CUDA device' "$logs/plain.log"; then exit 0; fi

bad=0
for row in $("$program" --device cuda --list | cut -d/ -f4 | sort -u); do
  for tool in memcheck racecheck synccheck initcheck; do
    log=$logs/$row.$tool.log
    rc=0
    # Without guards behind the data, so that the first byte beyond an allocation is reported.
    compute-sanitizer --tool "$tool" --error-exitcode 99 --print-limit 20 \
      "$program" --device cuda --no-guards --filter "$(cases "$row")" >"$log" 2>&1 || rc=$?
    reports=$(sed -nE 's/^=+ (ERROR|RACECHECK) SUMMARY: ([0-9]+) .*/\2/p' "$log" | tail -n 1)
    passed=$(sed -nE 's/^([0-9]+) passed, .*/\1/p' "$log")
    echo "$tool $row: ${reports:-no} reports, ${passed:-no} cases passed"
    if [ "$rc" != 0 ] || [ "${reports:-1}" != 0 ]; then
      echo "  exit code $rc, see $log"
      bad=1
    fi
  done
done
exit "$bad"
