#!/usr/bin/env bash
# fuzz.sh [SECONDS [TARGET...]]: builds fuzz targets (default: every one) and runs each for that
# long (default 60), from its seeds (tests/fuzz/make_seeds.py) and its corpus in tests/fuzz/corpus.
# Inputs that end a target are left in build-asan/findings.
set -eu -o pipefail
cd "$(dirname "$0")/.."
root=$PWD
seconds=${1:-60}
[ $# = 0 ] || shift
build=$root/build-asan
launcher=$(command -v ccache || true)
# Lets clones in other folders share compiled objects.
export CCACHE_BASEDIR="$root" CCACHE_NOHASHDIR=1
targets=${*:-$(cd tests/fuzz && ls -- *_fuzz.cc | sed 's/\.cc$//') tokenizer_fuzz}
# The one that is a Python program: through the package in .venv, where there is one.
python=.venv/bin/python
tokenizers=no skipped=0
# shellcheck disable=SC2086,SC2116
case " $(echo $targets) " in
  *" tokenizer_fuzz "*)
    # shellcheck disable=SC2086
    targets=$(printf '%s\n' $targets | grep -vx tokenizer_fuzz || true)
    tokenizers=yes
    ;;
esac
if [ $tokenizers = yes ] && ! "$python" -c 'import metal_marlin, tokenizers' 2>/dev/null; then
  echo "skipped: tokenizer_fuzz: no Python package in .venv (./dev build)"
  tokenizers=no skipped=1
fi
./dev install lint
cmake --preset asan -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher" >/dev/null
# shellcheck disable=SC2086
[ -z "$targets" ] || cmake --build "$build" --target $targets
seeds=$build/seeds
rm -rf "$build/failed" "$seeds"
mkdir -p "$build/findings" "$build/failed"
python3 -B tests/fuzz/make_seeds.py "$seeds"

# What targets write goes into memory, and away at the end, even where a target was killed.
memory=/dev/shm
[ -d "$memory" ] && [ -w "$memory" ] || memory=${TMPDIR:-/tmp}
TMPDIR=$(mktemp -d "$memory/marlin-fuzz-XXXXXX")
trap 'rm -rf "$TMPDIR"' EXIT
# A size that nobody can allocate is answered with a null pointer, as without a sanitizer.
ASAN_OPTIONS=allocator_may_return_null=1:strict_string_checks=1:detect_leaks=1
UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TMPDIR ASAN_OPTIONS UBSAN_OPTIONS

# fuzz TARGET: runs one, prints what it did in one piece, and leaves a file where it failed.
fuzz() {
  local target=$1 work=$build/corpus/$1 report
  local options=()
  while IFS= read -r option; do options+=("$option"); done <"$seeds/$target.options"
  cat "tests/fuzz/$target.dict" >>"$seeds/$target.dict" 2>/dev/null || true
  if grep -q '"' "$seeds/$target.dict"; then options+=("-dict=$seeds/$target.dict"); fi
  mkdir -p "$work"
  set -- "$work" "$seeds/$target"
  [ -d "tests/fuzz/corpus/$target" ] && set -- "$@" "$root/tests/fuzz/corpus/$target"
  [ "$target" = safetensors_fuzz ] && set -- "$@" "$root/tests/fuzz/malformed"
  if "$build/fuzz/$target" -max_total_time="$seconds" -timeout=60 -rss_limit_mb=2048 \
    -print_final_stats=1 -artifact_prefix="$build/findings/$target-" "${options[@]}" "$@" \
    </dev/null >"$build/$target.log" 2>&1; then
    report=$(grep -E 'INITED|DONE ' "$build/$target.log" || true)
  else
    report=$(tail -n 40 "$build/$target.log")
    : >"$build/failed/$target"
  fi
  report+=$'\n'$(grep -E 'number_of_executed_units|new_units_added' "$build/$target.log" || true)
  printf '== %s, %s s\n%s\n' "$target" "$seconds" "$report"
}
export -f fuzz
export root build seconds seeds

# One on each processor: a target has one thread.
# shellcheck disable=SC2086
[ -z "$targets" ] ||
  printf '%s\n' $targets | xargs -P "$(nproc)" -I {} bash -c 'set -eu; fuzz "$1"' fuzz {}
# shellcheck disable=SC2086
set -- $targets
count=$#
if [ $tokenizers = yes ]; then
  count=$((count + 1))
  echo "== tokenizer_fuzz, $seconds s"
  "$python" -B tests/fuzz/tokenizer_fuzz.py "$seconds" --keep "$build/findings" |
    sed '$d' || : >"$build/failed/tokenizer_fuzz"
fi
failed=$(find "$build/failed" -type f | wc -l)
echo "$((count - failed)) passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
