// The part of libdispatch that metal-cpp and the driver use.
#pragma once

#include <cstddef>

using dispatch_queue_t = struct dispatch_queue_s*;
using dispatch_data_t = struct dispatch_data_s*;
#define DISPATCH_DATA_DESTRUCTOR_DEFAULT nullptr

extern "C" {
dispatch_data_t dispatch_data_create(const void* bytes, size_t size, dispatch_queue_t queue,
                                     void* destructor);
void dispatch_release(dispatch_data_t data);
}
