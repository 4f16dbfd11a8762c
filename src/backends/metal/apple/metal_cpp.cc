// The single translation unit that defines metal-cpp's selectors, classes and device functions.
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include "backends/metal/apple/metal_cpp.h"
