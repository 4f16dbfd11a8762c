#!/usr/bin/env bash
# sanitize.sh asan|tsan [FILTER [TESTS]]: builds with the preset of that name, runs the tests and
# the conformance cases whose names match the filter (default: all). With TESTS, a regex for ctest,
# only those tests, and no conformance case: a data race in the thread pool, Quantize, a model's
# forward passes or the writers shows in minutes with
#   sanitize.sh tsan '' '^unit\.(base\.thread_pool|engine\.(threads|scheduler))_test$'
# MARLIN_SANITIZE_KERNELS=ON (default) instruments the CPU kernels, too, for which clang takes half
# an hour.
set -eu
cd "$(dirname "$0")/.."
preset=$1
filter=${2:-}
tests=${3:-}
build=build-$preset
# A size that nobody can allocate must be answered as without a sanitizer: with a null pointer.
export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:allocator_may_return_null=1

./dev install lint
launcher=$(command -v ccache || true)
# Lets clones in other folders share compiled objects.
export CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1
cmake --preset "$preset" -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher" \
  -DMARLIN_SANITIZE_KERNELS="${MARLIN_SANITIZE_KERNELS:-ON}" >/dev/null
if [ -n "$tests" ]; then
  # A program runs the tests of several files. ctest knows the commands of what is built alone.
  targets=$(find "$build" -name CTestTestfile.cmake -exec cat {} + |
    sed -nE "s|^add_test\(\[=\[(.*)\]=\] \"$PWD/$build/[^\"]*/([^/\"]*)\".*|\1 \2|p" |
    while read -r name program; do [[ $name =~ $tests ]] && echo "$program"; done | sort -u)
  # shellcheck disable=SC2086
  cmake --build "$build" --target $targets
else
  cmake --build "$build"
fi
report=$PWD/$build/ctest.xml
rc=0
excluded='^(checks|packaging|portability|python|golden|tools|exhaustive|conformance'
excluded+='|examples\.documents)'
# What only looks at the sources or packages cannot differ under a sanitizer; what a sanitizer would
# slow down to hours (all 2^32 floats) is left to Release, and so are the documents' commands, of
# which every one has tests of its own; the conformance program runs below.
ctest --test-dir "$build" -j "$(nproc)" --output-on-failure --no-tests=error \
  --output-junit "$report" --timeout 1800 ${tests:+-R "$tests"} \
  -E "$excluded" || rc=$?
count() { sed -n "s/^.*[[:space:]]$1=\"\([0-9]*\)\".*/\1/p" "$report" | head -n 1; }
passed=$(($(count tests) - $(count failures) - $(count skipped) - $(count disabled)))
failed=$(count failures)
skipped=$(($(count skipped) + $(count disabled)))

conformance=""
if [ -z "$tests" ]; then
  conformance=$(find "$build" -type f -name marlin_conformance -perm -u+x | head -n 1)
fi
if [ -n "$conformance" ]; then
  log=$build/conformance.log
  set -- --device cpu --jobs 0
  [ -z "$filter" ] || set -- "$@" --filter "$filter"
  "$conformance" "$@" </dev/null >"$log" 2>&1 || rc=$?
  tail -n 20 "$log"
  line=$(sed -n 's/^\([0-9]* passed, [0-9]* failed.*\)$/\1/p' "$log" | tail -n 1)
  # shellcheck disable=SC2086
  set -- ${line//[^0-9]/ }
  passed=$((passed + ${1:-0})) failed=$((failed + ${2:-1})) skipped=$((skipped + ${3:-0}))
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$rc" = 0 ] && [ "$failed" = 0 ]
