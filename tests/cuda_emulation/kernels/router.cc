#include "backends/cuda/moe/router/router.cu"
