#include "backends/cuda/recurrent/chunked/chunk_local.cu"
