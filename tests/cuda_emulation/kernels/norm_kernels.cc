#include "backends/cuda/rows/norm_kernels.cu"
