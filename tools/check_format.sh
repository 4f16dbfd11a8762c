#!/bin/sh
# Exits 1 and names the files that clang-format 14 would change; 77 if it is not installed.
set -eu
cd "$(dirname "$0")/.."
tool=$(command -v clang-format-14) || {
  echo "skipped: no clang-format-14"
  exit 77
}
unformatted=$(find include src metal_sim tests bench -type f \
  \( -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) ! -path '*/data/*' \
  -exec "$tool" --dry-run -Werror --ferror-limit=1 {} + 2>&1 |
  sed -n 's/^\([^:]*\):.*error: code should be clang-formatted.*/\1/p' | sort -u)
[ -z "$unformatted" ] && exit 0
echo "run ./dev format; it would change:"
echo "$unformatted"
exit 1
