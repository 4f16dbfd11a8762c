#!/bin/sh
# install_and_use.sh static|shared CMAKE SOURCE_DIR BUILD_DIR SCRATCH_DIR SHARED_BUILD_DIR
# Installs the library (when shared, built in SHARED_BUILD_DIR with the settings of BUILD_DIR),
# builds the consumer project against it, runs it, and checks the exported symbols of a shared one.
set -eu
kind=$1 cmake=$2 source=$3 build=$4 scratch=$5 shared_build=$6
here=$(cd "$(dirname "$0")" && pwd -P)
cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
generator=$(cached CMAKE_GENERATOR)
compiler=$(cached CMAKE_CXX_COMPILER)
launcher=$(cached CMAKE_CXX_COMPILER_LAUNCHER)
cuda=$(cached MARLIN_CUDA)
cuda_kinds=$(cached MARLIN_CUDA_KINDS)
cuda_architectures=$(cached CMAKE_CUDA_ARCHITECTURES)
cuda_arch=$(cached MARLIN_CUDA_ARCH)
cuda_launcher=$(cached CMAKE_CUDA_COMPILER_LAUNCHER)
# With the same flags the compiler cache has the objects.
werror=$(cached MARLIN_WERROR)

rm -rf "$scratch/prefix" "$scratch/consumer"
mkdir -p "$scratch"
if [ "$kind" = shared ]; then
  build=$shared_build
  "$cmake" -S "$source" -B "$build" -G "$generator" -DCMAKE_CXX_COMPILER="$compiler" \
    -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher" -DCMAKE_CUDA_COMPILER_LAUNCHER="$cuda_launcher" \
    -DMARLIN_CUDA="$cuda" -DMARLIN_CUDA_KINDS="$cuda_kinds" \
    -DCMAKE_CUDA_ARCHITECTURES="$cuda_architectures" -DMARLIN_CUDA_ARCH="$cuda_arch" \
    -DMARLIN_WERROR="$werror" -DCMAKE_BUILD_TYPE=Release \
    -DBUILD_SHARED_LIBS=ON -DMARLIN_BUILD_TESTS=OFF \
    -DMARLIN_BUILD_CLI=OFF >"$scratch/configure.log" 2>&1 || {
    cat "$scratch/configure.log"
    exit 1
  }
  "$cmake" --build "$build" --target marlin
fi
"$cmake" --install "$build" --prefix "$scratch/prefix" >"$scratch/install.log"

"$cmake" -S "$here/consumer" -B "$scratch/consumer" -G "$generator" \
  -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_PREFIX_PATH="$scratch/prefix"
"$cmake" --build "$scratch/consumer"
"$scratch/consumer/consumer"

# The same with pkg-config, from C.
if command -v pkg-config >/dev/null; then
  directory=$(dirname "$(find "$scratch/prefix" -name marlin.pc)")
  # shellcheck disable=SC2046
  "${CC:-cc}" "$source/examples/embed-c/main.c" -o "$scratch/embed_c" \
    $(PKG_CONFIG_PATH="$directory" pkg-config --cflags --libs marlin) -lm \
    -Wl,-rpath,"$(dirname "$directory")"
  "$scratch/embed_c"
else
  echo "no pkg-config: marlin.pc was not tested"
fi

[ "$kind" = shared ] || exit 0
if [ "$(uname -s)" != Linux ]; then
  echo "exported symbols are checked on Linux only"
  exit 0
fi
library=$(find "$scratch/prefix" -name 'libmarlin.so.*.*.*')
if [ -z "$library" ]; then
  echo "no shared library was installed"
  exit 1
fi
python3 "$here/exported_names.py" "$library" "$scratch/prefix/include" "${NM:-nm}"
