#include "backends/cuda/moe/router/router_gemm.cu"
