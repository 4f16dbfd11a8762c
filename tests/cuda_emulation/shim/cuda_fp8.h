// Stands for the header of the CUDA toolkit.
#pragma once

#include "cuda_runtime_api.h"
