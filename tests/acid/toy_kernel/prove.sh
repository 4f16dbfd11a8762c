# Sourced by tests/acid/run.sh inside the changed copy, with the build in $build.
# Without CUDA the new kernel can be planned, and the layer check knows its folder.
compile unit.backends.cuda
"$build/tests/unit.backends.cuda" toy_plan_test.cc
python3 -B tools/check_layers.py

# With CUDA it compiles, and the backend's table of kernel families contains it.
if command -v nvcc >/dev/null; then
  cuda=$build-cuda
  cmake -S . -B "$cuda" ${generator:+-G "$generator"} -DCMAKE_BUILD_TYPE=Release -DMARLIN_CUDA=ON \
    -DMARLIN_CUDA_KINDS=kFp4 -DMARLIN_BUILD_TESTS=OFF -DMARLIN_UNITY=OFF >"$work/configure.log" || {
    cat "$work/configure.log"
    fail "cmake failed"
  }
  objects=src/CMakeFiles/marlin_backends_cuda.dir/backends/cuda
  for object in gemm/toy/toy_plan.cc gemm/toy/toy_launch.cc gemm/toy/toy_kernel.cu \
    cuda_backend.cc; do
    cmake --build "$cuda" --target "$objects/$object.o" 2>/dev/null ||
      cmake --build "$cuda/src" --target "backends/cuda/$object.o"
  done
fi
