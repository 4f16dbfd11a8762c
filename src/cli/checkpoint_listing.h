// The tensors of a checkpoint as people think of them: a quantized module is one tensor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "marlin/checkpoint.h"

namespace marlin::cli {

struct ListedTensor {
  std::string name;        ///< As the source called it; "*" stands for the number of an expert.
  std::string format;      ///< Format of a quantized tensor, element type of another.
  Shape shape;             ///< [k, n] or [experts, k, n] of a quantized tensor; else as stored.
  int64_t group_size = 0;  ///< 0 for a tensor that is not quantized.
  int64_t parameters = 0;
  int64_t bytes = 0;
  LayerClass layer_class = LayerClass::kOther;
  double BitsPerWeight() const;
};

/// Modules first, then the tensors that belong to none; each in name order.
std::vector<ListedTensor> ListTensors(const Checkpoint& checkpoint);

/// True when any tensor is a routed expert's.
bool HasExperts(const Checkpoint& checkpoint);

}  // namespace marlin::cli
