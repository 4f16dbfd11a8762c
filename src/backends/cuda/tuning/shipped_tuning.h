// The measurements that the library brings: the files of tuning/, compiled in.
#pragma once

#include <string_view>

namespace marlin::cuda {

/// As ParseTuning reads it.
std::string_view ShippedTuning();

}  // namespace marlin::cuda
