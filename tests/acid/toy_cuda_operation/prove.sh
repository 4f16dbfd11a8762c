# Sourced by tests/acid/run.sh inside the changed copy, with the build in $build.
# Without CUDA the operation runs on the CPU, and the layer check knows its folders.
compile unit.ops
"$build/tests/unit.ops" toy_double_test.cc
python3 -B tools/check_layers.py

# With CUDA its kernel compiles, and the decoder calls all three of its functions.
if command -v nvcc >/dev/null; then
  cuda=$build-cuda
  cmake -S . -B "$cuda" ${generator:+-G "$generator"} -DCMAKE_BUILD_TYPE=Release -DMARLIN_CUDA=ON \
    -DMARLIN_CUDA_KINDS=kFp4 -DMARLIN_BUILD_TESTS=OFF -DMARLIN_UNITY=OFF >"$work/configure.log" || {
    cat "$work/configure.log"
    fail "cmake failed"
  }
  objects=src/CMakeFiles/marlin_backends_cuda.dir/backends/cuda
  for object in toy/toy_double.cu decoder/cuda_decoder.cc; do
    cmake --build "$cuda" --target "$objects/$object.o" 2>/dev/null ||
      cmake --build "$cuda/src" --target "backends/cuda/$object.o"
  done
  for function in 'Run(marlin::ToyDoubleCall' 'WorkspaceBytes(marlin::ToyDoubleCall' \
    'Load<marlin::ToyDoubleCall>'; do
    nm -C "$cuda/$objects/toy/toy_double.cu.o" | grep -q " T .*marlin::cuda::$function" ||
      fail "toy_double.cu does not define $function"
    nm -C "$cuda/$objects/decoder/cuda_decoder.cc.o" | grep -q " U .*marlin::cuda::$function" ||
      fail "the decoder does not call $function"
  done
fi
