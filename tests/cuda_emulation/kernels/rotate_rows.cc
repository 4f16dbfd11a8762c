#include "backends/cuda/attention/rotate_rows.cu"
