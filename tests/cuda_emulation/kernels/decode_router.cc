#include "backends/cuda/moe/router/decode_router.cu"
