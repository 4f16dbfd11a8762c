#include "backends/cuda/rows/norm_rows.cu"
