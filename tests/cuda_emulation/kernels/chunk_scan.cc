#include "backends/cuda/recurrent/chunked/chunk_scan.cu"
