// The tuning table that ships with the library: tuning/h200.txt, compiled in.
#pragma once

#include <string_view>

namespace marlin::cuda {

/// The text of the table, in the format of ParseTuning.
std::string_view ShippedTuning();

}  // namespace marlin::cuda
