#include "backends/cuda/weights/pack_tiles.cu"
