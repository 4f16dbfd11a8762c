#include "backends/cuda/recurrent/mamba2/ssd_scan.cu"
