#include "backends/cuda/moe/router/router_gemv.cu"
