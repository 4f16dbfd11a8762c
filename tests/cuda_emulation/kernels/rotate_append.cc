#include "backends/cuda/attention/rotate_append.cu"
