// The one definition of what metal-cpp's headers declare: selectors, classes, and the way to the
// devices.
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include "backends/metal/apple/metal_cpp.h"
