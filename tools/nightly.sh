#!/usr/bin/env bash
# The long checks: all conformance cases, every seeded fault, encoders over all 2^32 floats,
# AddressSanitizer and UndefinedBehaviorSanitizer, ThreadSanitizer, ten minutes of fuzzing a
# target, 64-bit Arm under qemu. Writes bench/records/nightly.json. Arguments: names of stages,
# default all.
set -eu
cd "$(dirname "$0")/.."
logs=build-nightly
mkdir -p "$logs" bench/records
started=$SECONDS
rows="" failures=0
wanted=" $* "

# stage NAME COMMAND...: runs a command and keeps what its closing line counts.
stage() {
  local name=$1 began=$SECONDS rc=0 line
  shift
  if [ "$wanted" != "  " ] && [ "${wanted#* "$name" }" = "$wanted" ]; then return 0; fi
  echo "== [$((SECONDS - started)) s] $name"
  set +e
  "$@" </dev/null >"$logs/$name.log" 2>&1
  rc=$?
  set -e
  line=$(sed -n 's/^\([0-9]* passed, [0-9]* failed.*\)$/\1/p' "$logs/$name.log" | tail -n 1)
  if [ "$rc" != 0 ]; then
    failures=$((failures + 1))
    tail -n 40 "$logs/$name.log"
  fi
  echo "   $([ "$rc" = 0 ] && echo ok || echo FAILED), $((SECONDS - began)) s: $line"
  rows="$rows${rows:+,}
    {\"stage\": \"$name\", \"ok\": $([ "$rc" = 0 ] && echo true || echo false),
     \"result\": \"$line\", \"seconds\": $((SECONDS - began))}"
}

conformance() {
  build/bin/marlin_conformance --nightly
}

mutants() {
  cmake --build build --target marlin_conformance_mutants
  python3 -B tests/conformance/run_mutants.py \
    "$(find build -type f -name marlin_conformance_mutants)"
}

# Encoders and roundings over all floats, and a thousand killed processes, instead of the samples
# that ./dev test takes.
exhaustive() {
  MARLIN_EXHAUSTIVE=full MARLIN_KILLS=1000 ctest --test-dir build --output-on-failure \
    --no-tests=error -R '^(exhaustive|fault)' --timeout 7200 -j "$(nproc)"
}

# Builds for 64-bit Arm and runs units and conformance under qemu: correctness, never speed.
aarch64() {
  local package missing=""
  for package in g++-aarch64-linux-gnu qemu-user googletest; do
    dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
  done
  if [ -n "$missing" ]; then
    # shellcheck disable=SC2086
    apt-get install -y --no-install-recommends $missing || {
      echo "install these packages and run again:$missing"
      return 1
    }
  fi
  cmake -S . -B build-aarch64 ${generator:+-G "$generator"} -DMARLIN_BUILD_BENCH=OFF \
    --toolchain cmake/aarch64-linux-gnu.cmake \
    -DCMAKE_CXX_COMPILER_LAUNCHER="$(command -v ccache || true)" || return 1
  cmake --build build-aarch64 || return 1
  ctest --test-dir build-aarch64 -j "$(nproc)" --output-on-failure --no-tests=error \
    -R '^(unit|property|conformance)' --timeout 3600 --output-junit "$PWD/$logs/aarch64.xml"
  local rc=$?
  count() { sed -n "s/^.*[[:space:]]$1=\"\([0-9]*\)\".*/\1/p" "$logs/aarch64.xml" | head -n 1; }
  echo "$(($(count tests) - $(count failures) - $(count skipped))) passed," \
    "$(count failures) failed, $(count skipped) skipped"
  return $rc
}

generator=""
if command -v ninja >/dev/null; then generator=Ninja; fi
stage test ./dev test
stage conformance conformance
stage mutants mutants
stage exhaustive exhaustive
stage asan tools/sanitize.sh asan
stage tsan tools/sanitize.sh tsan '/(gaussian|lattice)/'
stage fuzz tools/fuzz.sh "${MARLIN_FUZZ_SECONDS:-600}"
stage aarch64 aarch64

processor=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
cat >bench/records/nightly.json <<TXT
{
  "date": "$(date -u +%Y-%m-%d)",
  "commit": "$(git rev-parse HEAD 2>/dev/null || echo unknown)",
  "device": "$processor, $(nproc) processors",
  "stages": [$rows
  ]
}
TXT
echo "wrote bench/records/nightly.json; $failures stages failed"
[ "$failures" = 0 ]
