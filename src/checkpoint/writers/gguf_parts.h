// The tensors of a GGUF file that a tensor of a checkpoint becomes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/writers/gguf_metadata.h"
#include "checkpoint/writers/gguf_plan.h"
#include "marlin/status.h"

namespace marlin {

/// The tensors that hold a tensor or module with this number of rows, with the order of rows and
/// columns, without type and dimensions. Errors: kUnsupported without a name; kMalformedFile for
/// rows that are not the model's heads.
Result<std::vector<GgufOutput>> GgufOutputsOf(const GgufModelFacts& facts, const std::string& name,
                                              int64_t rows);

/// Weights as a tensor holds their columns. Errors: kUnsupported where groups would be cut.
Result<QuantizedWeights> GgufColumns(const GgufOutput& output, const QuantizedWeights& weights);

/// Moves and changes plain values of a tensor [..., columns] to those that the file holds: `bytes`
/// are of type.dtype, fp32 where values change.
void ToGgufValues(const GgufOutput& output, int64_t columns, std::vector<std::byte>* bytes);

}  // namespace marlin
