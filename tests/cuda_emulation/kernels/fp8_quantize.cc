#include "backends/cuda/gemm/fp8/fp8_quantize.cu"
