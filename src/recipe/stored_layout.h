// Which weight matrices a checkpoint stores transposed.
#pragma once

#include <string_view>

namespace marlin {

/// True when a model type stores a matrix as [in, out] (with experts in front) rather than the
/// usual [out, in].
bool IsStoredInOut(std::string_view model_type, std::string_view tensor_name);

}  // namespace marlin
