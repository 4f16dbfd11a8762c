#!/usr/bin/env bash
# compile_codecs.sh cuda|metal SOURCE_DIR GENERATED_DIR BINARY_DIR
# Compiles every codec header in a language other than C++20. Exit status 77: skipped.
set -eu
language=$1 source_dir=$2 generated_dir=$3 binary_dir=$4
here=$source_dir/tests/portability
werror=""
[ "${CI:-}" != true ] || werror=-Werror

case $language in
  cuda)
    if ! command -v nvcc >/dev/null 2>&1; then
      echo "skipped: no nvcc"
      exit 77
    fi
    # Device code needs no GPU to compile.
    nvcc -std=c++17 -O1 -Werror all-warnings -I "$source_dir/src" -I "$source_dir/include" \
      -I "$generated_dir" -c "$here/codecs.cu" -o "$binary_dir/codecs_cuda.o"
    echo "compiled as CUDA by $(nvcc --version | sed -n 's/^Cuda compilation tools, //p')"
    ;;
  metal)
    compiler=""
    for candidate in clang++ clang++-14 clang++-15 clang++-16; do
      if command -v "$candidate" >/dev/null 2>&1; then
        compiler=$candidate
        break
      fi
    done
    if [ -z "$compiler" ]; then
      echo "skipped: no clang"
      exit 77
    fi
    # The shim replaces Apple's compiler: C++17 without the standard library, with the address space
    # and the built-in functions that the headers use. Its `constant` implies const, unlike Metal's.
    "$compiler" -std=c++17 -O1 -Wall -Wextra $werror -nostdinc++ -ffp-contract=off \
      -Wno-duplicate-decl-specifier \
      -I "$here/msl_shim" -I "$source_dir/src" -I "$source_dir/include" -I "$generated_dir" \
      -include "$here/msl_shim/metal_language.h" -x c++ -c "$here/codecs.metal" \
      -o "$binary_dir/codecs_metal.o"
    echo "compiled as Metal Shading Language against the shim by $compiler"
    ;;
  *)
    echo "compile_codecs.sh: unknown language '$language'" >&2
    exit 1
    ;;
esac
