#!/usr/bin/env bash
# All source checks that are not done by a compiler; called by ./dev lint, which installs the tools
# and configures build/. Arguments: files for clang-tidy (default: all of src/
# and metal_sim/src/).
set -eu
cd "$(dirname "$0")/.."
rc=0
step() {
  local started=$SECONDS name=$1
  shift
  if "$@"; then
    echo "ok    $name ($((SECONDS - started)) s)" >&2
  else
    [ $? = 77 ] && return 0
    echo "FAIL  $name ($((SECONDS - started)) s)" >&2
    rc=1
  fi
}

tidy() {
  local jobs
  jobs=$(nproc 2>/dev/null || echo 2)
  if [ $# = 0 ]; then
    # Files that this machine does not compile have no compile command.
    local file="^ *\"file\": \"$(pwd -P)"
    set -- $(sed -n -e "s|$file/\(src/.*\.cc\)\",*\$|\1|p" \
      -e "s|$file/\(metal_sim/src/.*\.cc\)\",*\$|\1|p" build/compile_commands.json | sort -u)
  fi
  local out
  out=$(mktemp)
  # clang-tidy reports suppressed warnings of system headers on stderr and findings on stdout. The
  # compile commands may be g++'s, with -W options that clang does not know.
  printf '%s\0' "$@" |
    xargs -0 -n 1 -P "$jobs" clang-tidy-14 -p build --quiet \
      --extra-arg=-Wno-unknown-warning-option >"$out" 2>"$out.err" || {
    cat "$out"
    grep -E 'error:|Error' "$out.err" || true
    rm -f "$out" "$out.err"
    return 1
  }
  rm -f "$out" "$out.err"
}

# Checks address spaces and types of the Metal kernels. Needs clang 19, which is not always
# available.
metal_types() {
  command -v "${MARLIN_METAL_CLANG:-clang++-19}" >/dev/null 2>&1 || {
    echo "skipped: types of Metal kernels (no clang++-19)" >&2
    return 77
  }
  local files failed=0
  files=$(find src tests -name '*.metal' | sort)
  [ -n "$files" ] || return 77
  cmake --build build --target metal-marlin >build/metal-marlin.log 2>&1 || {
    tail -n 20 build/metal-marlin.log
    return 1
  }
  for file in $files; do
    build/bin/metal-marlin metal-sim "$file" --type-check --include include --include src \
      --include build/generated --include src/backends/metal/kernels4/declarations || failed=1
  done
  return "$failed"
}

python_tools() {
  [ -x .venv/bin/ruff ] && [ -x .venv/bin/mypy ] && return 0
  python3 -m venv .venv >/dev/null 2>&1 && .venv/bin/pip install -q ruff mypy >/dev/null 2>&1
}

step format tools/check_format.sh
for check in layers sizes names paths docs words; do
  step "$check self-test" python3 -B "tools/check_$check.py" --self-test
  step "$check" python3 -B "tools/check_$check.py" .
done
if python_tools; then
  files=$(find . -name '*.py' -not -path './build*' -not -path './.venv*/*' -not -path '*/data/*')
  # shellcheck disable=SC2086
  step ruff .venv/bin/ruff check --quiet $files
  # shellcheck disable=SC2086
  step mypy .venv/bin/mypy --no-error-summary $files
else
  echo "skipped: ruff and mypy (no python3-venv, or no network for pip)" >&2
fi
step "types of Metal kernels" metal_types
step clang-tidy tidy "$@"
exit $rc
