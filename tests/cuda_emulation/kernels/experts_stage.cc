#include "backends/cuda/moe/experts/experts_stage.cu"
