// The tensors of a checkpoint as users see them: a quantized module is one tensor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "marlin/checkpoint.h"

namespace marlin::cli {

struct ListedTensor {
  std::string name;        ///< The source's name; "*" stands for the expert number.
  std::string format;      ///< Format of a quantized tensor; otherwise the element type.
  Shape shape;             ///< [k, n] or [experts, k, n] if quantized; otherwise as stored.
  int64_t group_size = 0;  ///< 0 if the tensor is not quantized.
  Sparsity sparsity = Sparsity::kDense;
  bool permuted = false;       ///< Stored with a permutation along k.
  bool input_scaled = false;   ///< Products scale their inputs.
  int64_t input_hadamard = 0;  ///< The size of Hadamard blocks; 0: none.
  int64_t tensors = 1;         ///< Tensors of the source that it stands for: experts.
  int64_t parameters = 0;
  int64_t bytes = 0;
  LayerClass layer_class = LayerClass::kOther;
  double BitsPerWeight() const;
  bool quantized() const { return group_size != 0; }
  /// As in recipes, "fp4_e2m1/g64/2:4", and what else products of it do: "permuted", "scaled".
  std::string FormatText() const;
};

/// The sum of tensors.
struct ListedTotals {
  int64_t tensors = 0;
  int64_t parameters = 0;
  int64_t bytes = 0;

  void Add(const ListedTensor& tensor);
  double BitsPerWeight() const;
};

/// Modules first, then the plain tensors; each in name order.
std::vector<ListedTensor> ListTensors(const Checkpoint& checkpoint);

/// Tensors with a reason, a line for each reason: the routers of 48 layers are one name.
std::string SkippedLines(const std::vector<SkippedTensor>& skipped);

/// "86.9 % of parameters quantized; skipped:" and SkippedLines.
std::string CoverageLines(double coverage, const std::vector<SkippedTensor>& skipped);

/// "embedding s8/g64 (8.250 bits per weight), head int6/g64 (6.250)" as a line; nothing for a model
/// without either.
std::string EndsLine(const ModelEnds& ends);

/// "without tokenizer.json: ..." as a line.
std::string WithoutLine(const SkippedTensor& file);

/// A line for each of the notes of a checkpoint.
std::string NoteLines(const std::vector<std::string>& notes);

}  // namespace marlin::cli
