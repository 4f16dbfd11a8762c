#!/usr/bin/env bash
# compute_sanitizer.sh BUILD_DIR [JOBS]: runs the compute-sanitizer tools over a few cases of every
# CUDA kernel row, JOBS at a time (default 6), and prints the number of reports of each. Needs a GPU
# and a Release build with -DMARLIN_CUDA_RACECHECK=ON. Without it racecheck reports the pipeline
# stages of WGMMA kernels, because it does not track the ordering from the lanes of a warp
# through __syncwarp and one lane's mbarrier arrival to the waiting thread. Exit code 1 when
# anything is reported, a case fails, or a row has no case.
set -eu
export program=$1/bin/marlin_conformance
export logs=$1/compute_sanitizer
if ! command -v compute-sanitizer >/dev/null; then
  echo "compute-sanitizer: not found" >&2
  exit 2
fi
mkdir -p "$logs"

# Small shapes that gpu_cases.cc gives to every format, the first two for the decode GEMV kernels;
# the last one of the second line below uses split-K over the CTAs of a cluster; the last line has a
# case of 2:4 weights for the GEMV.
shapes='m2_n33_k144|m8_n64_k128|m17_n40_k96|m65_n72_k160|m1_n40_k96|m1_n72_k160'
export shapes+='|m16_n64_k16384'
export shapes+='|m9_n24_k1100'
# Larger shapes for the kernels that use TMA multicast or reduce split-K partials in global memory.
export meeting='m8_n2200_k4096|m13_n2304_k2560|m15_n4143_k14344|m40_n2320_k2064'
export meeting+='|m33_n4104_k2064'
cases() {
  case $1 in
    marlin_router_*)
      echo "^router/cuda/$1/tokens(1|3|37|40)/"
      return
      ;;
    marlin_experts_*)
      echo "^experts/cuda/$1/tokens(1|9|33)/experts[0-9]+/top2/hidden96/"
      return
      ;;
  esac
  echo -n "^(gemm|dequantize)/(fp4_e2m1|u4|s8|bf16)/cuda/$1/($shapes)_g[0-9]+/"
  case $1 in
    marlin_gemv_mma | marlin_gemm_wgmma | marlin_gemm_mma | marlin_gemm_sparse_*mma)
      echo "|^periodic/(fp4_e2m1|s8)/cuda/$1/($meeting)_g[0-9]+"
      ;;
    *) echo ;;
  esac
}

# check ROW TOOL: prints the counts, and the errors on a second line. Racecheck's reports about
# cuBLAS's own kernels (nvjet, cutlass) are counted separately: excluding those kernels raises an
# exception in the sanitizer.
check() {
  local log=$logs/$1.$2.log rc=0 reports foreign passed
  # Without guards behind the data, so that the first byte past an allocation is reported.
  compute-sanitizer --tool "$2" --error-exitcode 99 --print-limit 20 \
    "$program" --device cuda --no-guards --filter "$(cases "$1")" >"$log" 2>&1 || rc=$?
  reports=$(sed -nE 's/^=+ (ERROR|RACECHECK) SUMMARY: ([0-9]+) .*/\2/p' "$log" | tail -n 1)
  foreign=$(grep -cE 'Race reported between .* access at (nvjet|cutlass)' "$log")
  passed=$(sed -nE 's/^([0-9]+) passed, .*/\1/p' "$log")
  reports=$((${reports:-1} - foreign))
  echo "$2 $1: $reports reports, $foreign in cuBLAS, ${passed:-no} cases passed"
  if [ "$rc" = 99 ] && [ "$reports" = 0 ] && [ "$foreign" != 0 ]; then rc=0; fi
  if [ "$rc" != 0 ] || [ "$reports" != 0 ] || [ -z "$passed" ]; then
    echo "  exit code $rc, see $log"
    return 1
  fi
}
export -f cases check

# Detects whether there is a device, and runs the cases once without a tool.
"$program" --device cuda --filter "$(cases '[a-z0-9_]+')" >"$logs/plain.log" || {
  tail -n 20 "$logs/plain.log"
  exit 1
}
if grep '^skipped: no CUDA device' "$logs/plain.log"; then exit 0; fi

rows=$("$program" --device cuda --list | grep -oE '/cuda/[a-z0-9_]+' | cut -d/ -f3 | sort -u)
for row in $rows; do
  for tool in memcheck racecheck synccheck initcheck; do echo "$row $tool"; done
done | xargs -P "${2:-6}" -L 1 bash -c 'set -u; check "$1" "$2"' check || exit 1
