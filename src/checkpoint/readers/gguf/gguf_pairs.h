// Tensors of a GGUF file of which two become one elsewhere: keys and values of MLA, and stacks of
// gate and up. The first of two says what they become; the second is skipped.
#pragma once

#include <string>

#include "checkpoint/readers/gguf/gguf_rows.h"
#include "checkpoint/readers/gguf/gguf_tensors.h"
#include "marlin/status.h"

namespace marlin {

/// Whether a tensor is the second of two.
bool IsGgufPartner(const GgufTensorList& list, const GgufFileTensor& tensor);

/// The values that belong to MLA's keys; null for every other tensor.
const GgufFileTensor* GgufLatentPartner(const GgufTensorList& list, const GgufFileTensor& tensor);

/// Keys and values of MLA, and the tensor that they are made into.
struct GgufLatentPair {
  GgufLatent latent;
  std::string name;
  Shape shape;  ///< In fp32, since keys were transposed before they were quantized.
  int64_t bytes = 0;
};
/// Errors: kMalformedFile for shapes that contradict each other and for types without floats.
Result<GgufLatentPair> PairGgufLatent(const GgufTensorList& list, const GgufFileTensor& keys,
                                      const GgufFileTensor& values);

/// The rows of gate and up, in turn or one after the other; biases [experts, n] are a stack of
/// columns of one element.
/// Errors: kMalformedFile if `partner`, up, is missing or differs in shape or type; kUnsupported if
/// the factors differ.
Result<GgufRows> JoinGguf(const GgufTensorList& list, const GgufFileTensor& gate,
                          const std::string& partner);

}  // namespace marlin
