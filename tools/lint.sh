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

# Builds the site, for which the package must have been built.
site() {
  [ -e build/python/_core.pyi ] || {
    echo "skipped: site (no build/python/_core.pyi: ./dev build makes it)" >&2
    return 77
  }
  local packages
  packages=$(.venv/bin/python tools/extras.py docs) || return 1
  # shellcheck disable=SC2086
  .venv/bin/pip install -q $packages >/dev/null 2>&1 || {
    echo "skipped: site (pip could not install $packages)" >&2
    return 77
  }
  tools/site.sh build
}

step format tools/check_format.sh
for check in layers sizes names paths docs words headers; do
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
step site site
step "types of Metal kernels" metal_types
step "clang-tidy self-test" python3 -B tests/tools/tidy_test.py
step clang-tidy tools/tidy.py "$@"
exit $rc
