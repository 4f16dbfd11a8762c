#include "backends/cuda/moe/experts/experts_sort.cu"
