#include "backends/cuda/common/tile_gemm.cc"
