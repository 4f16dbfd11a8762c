// Which weight matrices a checkpoint stores transposed.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "marlin/tensor.h"

namespace marlin {

/// True when a model type stores a matrix as [in, out] (with experts in front) rather than the
/// usual [out, in]. Of stacked experts other writers may have stored the other one: see
/// StacksAreInOut.
bool IsStoredInOut(std::string_view model_type, std::string_view tensor_name);

/// The names of the two stacks of a layer's experts, given one of them: gate and up fused, and
/// down. Nothing: the tensor is no such stack.
std::optional<std::array<std::string, 2>> ExpertStacks(std::string_view tensor_name);

/// Whether two stacks are [experts, in, out], gate and up [experts, hidden, 2 * inner] and down
/// [experts, inner, hidden], or with the last two dimensions exchanged. No sizes fit both. Nothing:
/// they fit neither.
std::optional<bool> StacksAreInOut(const Shape& gate_up, const Shape& down);

}  // namespace marlin
