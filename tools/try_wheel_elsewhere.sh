#!/usr/bin/env bash
# try_wheel_elsewhere.sh FILE [RELEASE [PYTHON_FOLDER]]: try_wheel.py on another Debian, which
# debootstrap installs in a folder: RELEASE's own Python (default: trixie's), or the one in
# PYTHON_FOLDER, which is copied. Needs root and debootstrap.
set -eu
cd "$(dirname "$0")/.."
file=${1:?try_wheel_elsewhere.sh: expected a wheel or a source distribution}
release=${2:-trixie}
python_folder=${3:-}
root=build-wheel/$release

[ "$(id -u)" = 0 ] || { echo "try_wheel_elsewhere.sh: needs root" >&2; exit 1; }
if [ ! -e "$root/usr/bin/python3" ]; then
  mkdir -p "$root"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$release" "$root" \
    >"$root.log" 2>&1 || { tail -n 5 "$root.log" >&2; exit 1; }
fi
python=python3
if [ -n "$python_folder" ]; then
  mkdir -p "$root$(dirname "$python_folder")"
  cp -a "$python_folder" "$root$(dirname "$python_folder")"
  python=$python_folder/bin/python3
fi
rm -rf "$root/trial"
mkdir -p "$root/trial/tools" "$root/trial/examples"
cp "$file" "$root/trial/"
cp tools/try_wheel.py "$root/trial/tools/"
cp -r examples/tiny-qwen3-moe "$root/trial/examples/"
# The index is reached as from here, through a company's proxy perhaps.
cp /etc/resolv.conf "$root/etc/"
certificates=/etc/ssl/certs/ca-certificates.crt
cp "$certificates" "$root$certificates"
# A mount namespace of its own: the machine's processes and folders stay as they are.
exec unshare --mount --pid --fork --mount-proc="$root/proc" chroot "$root" env -i \
  PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PIP_CERT="$certificates" \
  ${PIP_INDEX_URL:+PIP_INDEX_URL="$PIP_INDEX_URL"} \
  sh -c '. /etc/os-release; echo "$PRETTY_NAME"; cd /trial; exec "$0" tools/try_wheel.py "$1"' \
  "$python" "$(basename "$file")"
