// Names of weights as each program writes them, brought to the names of unquantized checkpoints.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "recipe/decoder_shape.h"

namespace marlin {

/// The suffix of a weight's name.
inline constexpr std::string_view kWeightSuffix = ".weight";

enum class Producer : uint8_t { kHuggingFace, kMlx };

/// The name that the weight of a module has in an unquantized checkpoint, from the part of its
/// tensors' names before ".weight", ".qweight" and so on. Stacked experts that are stored one by
/// one in unquantized checkpoints get the name that they share, with "*" for the number.
std::string PlainWeightName(Producer producer, std::string_view base, bool stacked);

/// The name of an expert's matrix in the style of its model type: "mlp.experts.*.gate_proj.weight"
/// is "block_sparse_moe.experts.*.w1.weight" for Mixtral. Other names stay.
std::string ExpertNameInStyle(const ExpertStyle& style, std::string_view name);

}  // namespace marlin
