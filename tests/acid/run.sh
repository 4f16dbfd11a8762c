#!/usr/bin/env bash
# Proves that an extension touches only the files that CONTRIBUTING.md names: applies the extensions
# of this folder (or those given as arguments) to one copy of the sources, which is built once, and
# runs each extension's own proof. With --self-test it only shows, in seconds, that each extension
# is refused when it touches one file or one line more. An extension is a folder with
#   files/       new files, at their paths; may be missing
#   lines.txt    FILE LINE: lines added at the end of existing files
#   allowed.txt  new FILE | lines COUNT FILE: the files and line counts that it may touch
#   prove.sh     commands that must succeed in the copy
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
root=$(cd "$here/../.." && pwd -P)
work=${MARLIN_ACID_DIR:-$root/build-acid}

fail() {
  echo "acid: $*" >&2
  exit 1
}

copy_sources() {
  local destination=$1
  rm -rf "$destination"
  mkdir -p "$destination"
  if git -C "$root" rev-parse --git-dir >/dev/null 2>&1; then
    (cd "$root" && git ls-files -z --cached --others --exclude-standard |
      while IFS= read -r -d '' file; do [ -e "$file" ] && printf '%s\0' "$file"; done |
      tar -cf - --null -T -) | tar -xf - -C "$destination"
  else
    tar -cf - -C "$root" --exclude='./build*' --exclude=./.venv . | tar -xf - -C "$destination"
  fi
}

# check_touched ADDITION COPY: checks that every file and line of the extension is allowed.
check_touched() {
  local addition=$1 copy=$2 file line count
  : >"$work/new"
  [ ! -d "$addition/files" ] ||
    (cd "$addition/files" && find . -type f | sed 's|^\./||') >"$work/new"
  while IFS= read -r file; do
    grep -qxF "new $file" "$addition/allowed.txt" || fail "adds an unlisted file: $file"
    [ ! -e "$copy/$file" ] || fail "exists already: $file"
  done <"$work/new"
  sed -n '/^#/d; s/^\([^ ]*\) .*/\1/p' "$addition/lines.txt" | sort | uniq -c |
    while read -r count file; do
      line=$(sed -n "s|^lines \([0-9]*\) $file\$|\1|p" "$addition/allowed.txt")
      [ -n "$line" ] || fail "changes an unlisted file: $file"
      [ "$count" -le "$line" ] || fail "adds $count lines to $file, allowed $line"
      [ -f "$copy/$file" ] || fail "does not exist: $file"
    done
}

apply_addition() {
  local addition=$1 copy=$2 file line
  [ ! -d "$addition/files" ] || cp -R "$addition/files/." "$copy"
  while IFS=' ' read -r file line; do
    case $file in '#'* | '') continue ;; esac
    printf '%s\n' "$line" >>"$copy/$file"
  done <"$addition/lines.txt"
}

compile() {
  local launcher
  launcher=$(command -v ccache || true)
  # The CPU backend proves a format, a reader or an operation in a tenth of the build time. With the
  # warning options of CI's stage `test` the compiler cache has its objects.
  local werror=OFF
  [ "${CI:-}" != true ] || werror=ON
  cmake -S . -B "$build" ${generator:+-G "$generator"} -DCMAKE_BUILD_TYPE=Release \
    -DMARLIN_CUDA=OFF -DMARLIN_WERROR="$werror" -DMARLIN_BUILD_TESTS=ON \
    -DMARLIN_TEST_FILES=/toy_ -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher" >"$work/configure.log" || {
    cat "$work/configure.log"
    fail "cmake failed"
  }
  cmake --build "$build" -j "${MARLIN_JOBS:-$(nproc)}" --target "$@"
}

# self_test ADDITION: checks that check_touched detects violations.
self_test() {
  local broken=$work/broken first
  rm -rf "$broken"
  cp -R "$1" "$broken"
  (check_touched "$broken" "$root") || fail "self-test: the extension itself was refused"
  mkdir -p "$broken/files/src"
  echo "// one file more" >"$broken/files/src/one_file_more.h"
  ! (check_touched "$broken" "$root") 2>/dev/null || fail "self-test: an extra file was allowed"
  rm "$broken/files/src/one_file_more.h"
  echo "CMakeLists.txt # one file more" >>"$broken/lines.txt"
  ! (check_touched "$broken" "$root") 2>/dev/null || fail "self-test: a changed file was allowed"
  first=$(sed -n '/^#/d; s/^\([^ ]*\) .*/\1/p' "$1/lines.txt" | head -n 1)
  cp "$1/lines.txt" "$broken/lines.txt"
  echo "$first // one line more" >>"$broken/lines.txt"
  ! (check_touched "$broken" "$root") 2>/dev/null || fail "self-test: an extra line was allowed"
}

mkdir -p "$work"
generator=""
if command -v ninja >/dev/null; then generator=Ninja; fi
passed=0 failed=0
copy=$work/source
# Where a checkout has its build folder, so that relative paths, and with them the objects in the
# compiler cache, are the same as in the unchanged project.
build=$copy/build
# Lets the copy share compiled objects.
export CCACHE_BASEDIR="$copy" CCACHE_NOHASHDIR=1
only_self_test=false
if [ "${1:-}" = --self-test ]; then
  only_self_test=true
  shift
fi
additions=()
for addition in "$here"/*/; do
  if [ $# -gt 0 ] && ! printf '%s\n' "$@" | grep -qxF "$(basename "$addition")"; then continue; fi
  additions+=("${addition%/}")
done
[ "${#additions[@]}" -gt 0 ] || fail "no extension of that name: $*"
for addition in "${additions[@]}"; do self_test "$addition"; done
if $only_self_test; then
  echo "self-test: ${#additions[@]} extensions are refused with one file or line more"
  exit 0
fi
copy_sources "$copy"
for addition in "${additions[@]}"; do
  check_touched "$addition" "$copy"
  apply_addition "$addition" "$copy"
done
for addition in "${additions[@]}"; do
  echo "== acid: $(basename "$addition")"
  set +e
  (
    set -eu
    cd "$copy"
    rm -rf "$build/model" "$build/plain" "$build/again"
    # shellcheck disable=SC1091
    . "$addition/prove.sh"
  )
  rc=$?
  set -e
  if [ "$rc" = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
