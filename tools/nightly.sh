#!/usr/bin/env bash
# nightly.sh [--resume] [STAGE...]: the long checks, stage by stage; hours on a small machine.
#
#   (nothing)   every stage
#   STAGE...    these alone
#   --resume    leaves out the stages that passed at this commit already
#   --list      prints the stages and what each takes on two cores
#
# Each stage's row of bench/records/nightly.json is written when the stage ends, with its own date
# and commit; rows of stages that did not run stay. "complete" in it says that every stage passed at
# one commit: the previous one, since the commit that changes the record cannot name itself.
set -eu
cd "$(dirname "$0")/.."
logs=build-nightly
record=bench/records/nightly.json
started=$SECONDS
failures=0 resume=no wanted=""

# In the order in which they run.
stages="test conformance levels mutants exhaustive property asan tsan python integrations fuzz"
stages="$stages vllm wheel alone cuda aarch64"

# How long a stage takes on two cores, about, and what it is.
describe() {
  case $1 in
    test) echo "30 min  ./dev test" ;;
    conformance) echo "20 min  the larger selection of conformance cases" ;;
    levels) echo "60 min  units, properties, conformance at every level of MARLIN_CPU" ;;
    mutants) echo "15 min  every planted fault must be noticed, at every level and in Metal" ;;
    exhaustive) echo "90 min  encoders and roundings over all 2^32 floats, 1000 killed processes" ;;
    property) echo "20 min  properties, MARLIN_PROPERTY_RUNS=2000 of each" ;;
    asan) echo "60 min  everything under AddressSanitizer and UndefinedBehaviorSanitizer" ;;
    tsan) echo "30 min  units, faults and properties under ThreadSanitizer" ;;
    python) echo "20 min  the Python extension under AddressSanitizer" ;;
    integrations) echo "30 min  PyTorch, transformers and MLX" ;;
    fuzz) echo "75 min  MARLIN_FUZZ_SECONDS=600 of each target, one on each processor" ;;
    vllm) echo "30 min  the plug-in in the engines of two versions of vLLM" ;;
    wheel) echo "30 min  wheel and source distribution on clean Pythons and another Debian" ;;
    alone) echo "45 min  every file compiled by itself, as editors see it, not in batches" ;;
    cuda) echo "60 min  CUDA compiles, not run: all kinds for 8.0 and 9.0a, one for every GPU" ;;
    aarch64) echo "90 min  units, properties and conformance for 64-bit Arm under qemu" ;;
  esac
}

die() {
  echo "nightly: $*" >&2
  exit 1
}

# --- stages -------------------------------------------------------------------------------------

# What is in build/ is as the sources are now, whichever stages were left out.
rebuild() {
  [ -e build/CMakeCache.txt ] || {
    echo "build/ is missing: run the stage test first"
    return 1
  }
  cmake --build build -j "$(nproc)" "$@"
}

# run_ctest FOLDER [ctest options]: ends with the line that says how many.
run_ctest() {
  local folder=$1 report rc=0
  shift
  report=$PWD/$folder/nightly.xml
  rm -f "$report"
  ctest --test-dir "$folder" -j "$(nproc)" --output-on-failure --no-tests=error \
    --output-junit "$report" "$@" || rc=$?
  count() { sed -n "s/^.*[[:space:]]$1=\"\([0-9]*\)\".*/\1/p" "$report" | head -n 1; }
  echo "$(($(count tests) - $(count failures) - $(count skipped) - $(count disabled))) passed," \
    "$(count failures) failed, $(($(count skipped) + $(count disabled))) skipped"
  return $rc
}

run_test() { ./dev test; }

run_conformance() {
  rebuild --target marlin_conformance || return 1
  build/bin/marlin_conformance --nightly
}

# Every level that this processor has; with the counts of all of them.
run_levels() {
  local level counts rc=0 passed=0 failed=0 skipped=0
  rebuild || return 1
  for level in scalar avx2 avx512 amx neon; do
    MARLIN_CPU=$level build/bin/metal-marlin devices 2>/dev/null | grep -q '^cpu (cpu)' || continue
    echo "-- MARLIN_CPU=$level"
    MARLIN_CPU=$level run_ctest build -R "^(unit|property|conformance\.$level\$)" \
      --timeout 7200 >"$logs/level-$level.log" 2>&1 || rc=1
    counts=$(tail -n 1 "$logs/level-$level.log")
    [ "$rc" = 0 ] || grep -E '\(Failed\)|\(Timeout\)' "$logs/level-$level.log" || true
    echo "   $counts"
    # shellcheck disable=SC2086
    set -- ${counts//[^0-9]/ }
    passed=$((passed + ${1:-0})) failed=$((failed + ${2:-1})) skipped=$((skipped + ${3:-0}))
  done
  echo "$passed passed, $failed failed, $skipped skipped"
  [ "$rc" = 0 ] && [ "$passed" != 0 ]
}

run_mutants() {
  rebuild || return 1
  MARLIN_MUTANTS=all run_ctest build -R '^conformance\.(metal_)?mutants' --timeout 7200
}

# All floats and a thousand killed processes, instead of the samples that ./dev test takes.
run_exhaustive() {
  rebuild || return 1
  MARLIN_EXHAUSTIVE=full MARLIN_KILLS=1000 MARLIN_WRITER_ROUNDS=200 \
    run_ctest build -R '^(exhaustive|fault)' --timeout 14400
}

run_property() {
  rebuild || return 1
  MARLIN_PROPERTY_RUNS="${MARLIN_PROPERTY_RUNS:-2000}" run_ctest build -R '^property' --timeout 7200
}

run_asan() { tools/sanitize.sh asan; }
# What several threads run: the thread pool, Quantize, forward passes, the writers, the operations.
# Not the Metal simulator: ThreadSanitizer does not follow its fibers.
run_tsan() {
  local models='unit\.model\.(lifetime|sampling|threads)'
  tools/sanitize.sh tsan '' \
    "^(unit\.(base|checkpoint|layout|ops|plan|quantize)\..*|$models|fault\..*|property\..*)_test\$"
}
run_python() { tools/sanitize_python.sh; }
run_integrations() { ./dev test-integrations; }
run_vllm() { ./dev test-vllm; }
run_fuzz() { tools/fuzz.sh "${MARLIN_FUZZ_SECONDS:-600}"; }

# The counts of several programs are added up.
run_wheel() {
  local log=$logs/wheel-trials.log failed="0 passed, 1 failed"
  rm -rf dist
  ./dev wheel || return 1
  # shellcheck disable=SC2046
  {
    python3 -B tools/try_wheel.py dist/*.whl $(python3 -B tools/pythons.py) || echo "$failed"
    python3 -B tools/try_wheel.py dist/*.tar.gz || echo "$failed"
    if [ "$(id -u)" = 0 ] && command -v debootstrap >/dev/null; then
      tools/try_wheel_elsewhere.sh dist/*.whl || echo "$failed"
    else
      echo "skipped: another Debian, which needs root and debootstrap"
    fi
  } 2>&1 | tee "$log"
  awk '/^[0-9]+ passed, [0-9]+ failed$/ { passed += $1; failed += $3 }
    END { print passed + 0 " passed, " failed + 0 " failed, 0 skipped"
          exit !passed || failed }' "$log"
}

# compile_as FOLDER [cmake options]: compiles everything in a build folder of its own.
compile_as() {
  local folder=$1
  shift
  cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMARLIN_WERROR=ON \
    -DCMAKE_CXX_COMPILER_LAUNCHER="$(command -v ccache || true)" \
    -DCMAKE_CUDA_COMPILER_LAUNCHER="$(command -v ccache || true)" "$@" || return 1
  cmake --build "$folder" || return 1
}
run_alone() { compile_as build-alone -DMARLIN_UNITY=OFF -DMARLIN_CUDA=OFF -DMARLIN_BUILD_TESTS=ON; }
run_cuda() {
  compile_as build-cuda -DMARLIN_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=80-real;90a-real" &&
    compile_as build-cuda-all -DMARLIN_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=all \
      -DMARLIN_CUDA_KINDS=kFp4
}

# Builds for 64-bit Arm and runs units and conformance under qemu: correctness, never speed.
run_aarch64() {
  local package missing="" generator=""
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
  if command -v ninja >/dev/null; then generator=Ninja; fi
  cmake -S . -B build-aarch64 ${generator:+-G "$generator"} \
    --toolchain cmake/aarch64-linux-gnu.cmake -DMARLIN_BUILD_TESTS=ON \
    -DCMAKE_CXX_COMPILER_LAUNCHER="$(command -v ccache || true)" || return 1
  cmake --build build-aarch64 || return 1
  run_ctest build-aarch64 -R '^(unit|metal_sim|property|conformance)' --timeout 3600
}

# --- the record ---------------------------------------------------------------------------------

# The newest commit that changes more than the record, so that the record can be committed between
# stages; with "-dirty" where something else is not committed.
commit_of_tree() {
  local commit
  commit=$(git log -1 --format=%H -- . ":(exclude)$record" 2>/dev/null) || commit=""
  [ -n "$commit" ] || commit=unknown
  git diff --quiet HEAD -- . ":(exclude)$record" 2>/dev/null || commit=$commit-dirty
  echo "$commit"
}

keep() { python3 -B tools/nightly_record.py "$record" "$@"; }

# stage NAME: runs it and keeps what its closing line counts.
stage() {
  local name=$1 began=$SECONDS rc=0 line outcome=ok commit
  commit=$(commit_of_tree)
  if [ "$resume" = yes ] && [ "$(keep commit "$name")" = "$commit" ]; then
    echo "== $name: passed at this commit"
    return 0
  fi
  echo "== [$((SECONDS - started)) s] $name: $(describe "$name")"
  set +e
  ("run_$name") </dev/null >"$logs/$name.log" 2>&1
  rc=$?
  set -e
  line=$(sed -n 's/^\([0-9]* passed, [0-9]* failed.*\)$/\1/p' "$logs/$name.log" | tail -n 1)
  if [ "$rc" != 0 ]; then
    outcome=FAILED
    failures=$((failures + 1))
    tail -n 40 "$logs/$name.log"
  fi
  echo "   $outcome, $((SECONDS - began)) s: $line"
  keep add "$name" "$outcome" "$((SECONDS - began))" "$commit" "$line"
}

[ -x tools/sanitize_python.sh ] || stages=${stages/ python/}
for argument in "$@"; do
  case $argument in
    --resume) resume=yes ;;
    --list)
      for name in $stages; do printf '%-13s %s\n' "$name" "$(describe "$name")"; done
      exit 0
      ;;
    *)
      case " $stages " in
        *" $argument "*) wanted="$wanted $argument" ;;
        *) die "unknown stage: $argument; stages: $stages" ;;
      esac
      ;;
  esac
done
mkdir -p "$logs"
processor=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
# shellcheck disable=SC2086
keep begin --device "$processor, $(nproc) processors" $stages
for name in $stages; do
  case " ${wanted:-$stages} " in *" $name "*) stage "$name" ;; esac
done
echo "wrote $record; $failures stages failed"
[ "$failures" = 0 ]
