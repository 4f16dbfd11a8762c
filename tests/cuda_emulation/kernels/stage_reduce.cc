#include "backends/cuda/common/stage_reduce.cu"
