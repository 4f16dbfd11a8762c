#!/usr/bin/env bash
# fuzz.sh [SECONDS]: builds every fuzz target and runs each for that long (default 60), starting
# from its corpus in tests/fuzz/corpus/<target>. A crashing input is left in build-fuzz/findings.
set -eu
cd "$(dirname "$0")/.."
seconds=${1:-60}
build=build-fuzz
launcher=$(command -v ccache || true)
targets=$(cd tests/fuzz 2>/dev/null && ls -- *_fuzz.cc 2>/dev/null | sed 's/\.cc$//' || true)
if [ -z "$targets" ]; then
  echo "0 passed, 0 failed, 0 skipped"
  exit 0
fi
cmake --preset fuzz -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher" >/dev/null
# shellcheck disable=SC2086
cmake --build "$build" --target $targets
mkdir -p "$build/findings"
rm -rf "$build/failed"
mkdir "$build/failed"

# fuzz TARGET: runs one, prints what it did in one piece, and leaves a file where it failed.
fuzz() {
  local target=$1 program work dictionary report
  program=$(find "$build" -type f -name "$target" -perm -u+x | head -n 1)
  work=$build/corpus/$target
  mkdir -p "$work"
  set -- "$work"
  [ -d "tests/fuzz/corpus/$target" ] && set -- "$@" "tests/fuzz/corpus/$target"
  [ "$target" = safetensors_fuzz ] && set -- "$@" tests/fuzz/malformed
  dictionary=tests/fuzz/$target.dict
  [ -f "$dictionary" ] && set -- "-dict=$dictionary" "$@"
  if "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="$build/findings/$target-" "$@" >"$build/$target.log" 2>&1; then
    report=$(grep -E 'number_of_executed_units|new_units_added' "$build/$target.log" || true)
  else
    report=$(tail -n 40 "$build/$target.log")
    : >"$build/failed/$target"
  fi
  printf '== %s, %s s\n%s\n' "$target" "$seconds" "$report"
}
export -f fuzz
export build seconds

# One on each processor: a target has one thread.
# shellcheck disable=SC2086
printf '%s\n' $targets | xargs -P "$(nproc)" -I {} bash -c 'fuzz "$1"' fuzz {}
# shellcheck disable=SC2086
set -- $targets
failed=$(find "$build/failed" -type f | wc -l)
echo "$(($# - failed)) passed, $failed failed"
[ "$failed" = 0 ]
