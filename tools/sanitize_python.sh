#!/usr/bin/env bash
# sanitize_python.sh [pytest arguments]: builds the Python extension with AddressSanitizer and
# UndefinedBehaviorSanitizer and runs tests/python with it. Without arguments: all of them.
set -eu
cd "$(dirname "$0")/.."
build=$PWD/build-asan-python
venv=$build/venv
say() { printf '== %s\n' "$*" >&2; }

mkdir -p "$build"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
python=$venv/bin/python
modules="jinja2, nanobind, numpy, pytest, tokenizers, fastapi, rich, openai, anthropic, httpx"
"$python" -c "import $modules" 2>/dev/null || {
  say "installing $modules"
  # shellcheck disable=SC2046
  "$python" -m pip --disable-pip-version-check -q install "nanobind>=2.2" numpy pytest \
    tokenizers "jinja2>=3.1.6" $("$python" tools/extras.py serve chat) openai anthropic httpx >&2
}

say "building"
launcher=$(command -v ccache || true)
# Lets clones in other folders share compiled objects.
export CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1
cmake -S . -B "$build/cmake" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" \
  "-DMARLIN_SANITIZE=address;undefined" -DMARLIN_BUILD_PYTHON=ON -DMARLIN_BUILD_TESTS=OFF \
  -DMARLIN_CUDA=OFF -DPython_EXECUTABLE="$python" \
  -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher" >"$build/configure.log"
# The stub of the extension is made by importing it, which wants the sanitizers loaded before.
cmake --build "$build/cmake" --target _core >&2

# The package next to its extension, and its command, found before any installed ones.
package=$build/package
rm -rf "$package"
mkdir -p "$package"
cp -R python/metal_marlin "$package/"
find "$build/cmake/python" -name '_core*.so' -exec cp {} "$package/metal_marlin/" \;
printf '#!%s\nimport sys\nfrom metal_marlin.cli import main\nsys.exit(main())\n' "$python" \
  >"$venv/bin/metal-marlin"
chmod +x "$venv/bin/metal-marlin"

compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[^=]*=//p' "$build/cmake/CMakeCache.txt")
preload=""
for library in libasan.so libubsan.so libstdc++.so.6; do
  preload="$preload $("$compiler" -print-file-name=$library)"
done
# The interpreter frees little at its end. A size that nobody can allocate must be answered as
# without a sanitizer.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:strict_string_checks=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export PYTHONPATH=$package PYTHONMALLOC=malloc PYTHONDONTWRITEBYTECODE=1
log=$build/pytest.log rc=0
[ $# -gt 0 ] || set -- tests/python
say "testing"
LD_PRELOAD="${preload# }" "$python" -m pytest -q -p no:cacheprovider "$@" >"$log" 2>&1 || rc=$?
cat "$log" >&2
count() { sed -n "\$s/.*\b\([0-9][0-9]*\) $1.*/\1/p" "$log"; }
passed=$(count passed) failed=$(count failed) skipped=$(count skipped) errors=$(count 'errors*')
failed=$((${failed:-0} + ${errors:-0}))
# A sanitizer that ends the interpreter leaves no line of pytest's.
if [ "$rc" != 0 ] && [ "$failed" = 0 ]; then failed=1; fi
echo "${passed:-0} passed, $failed failed, ${skipped:-0} skipped"
[ "$rc" = 0 ] && [ "${passed:-0}" != 0 ]
