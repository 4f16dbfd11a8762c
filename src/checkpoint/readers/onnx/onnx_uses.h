// How the nodes of an ONNX model use a matrix: the file itself does not say which of its dimensions
// is the input of a linear layer.
#pragma once

#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/module_reader.h"
#include "checkpoint/readers/onnx/onnx_file.h"

namespace marlin {

/// The consumers of every value of a graph. The nodes must outlive it.
class OnnxUses {
 public:
  OnnxUses() = default;
  explicit OnnxUses(const std::vector<OnnxNode>& nodes);

  /// Whether any node has the value as input.
  bool IsUsed(std::string_view value) const { return consumers_.contains(value); }

  /// How a value holds the matrix that products multiply by, or the matrices in its last two
  /// dimensions: MatMul and Gemm by the side that it is on and their attributes, through Transpose,
  /// Cast, Identity and (de)quantization, up to a fixed number of nodes. A table of rows that
  /// Gather reads, and what Transpose does for another node, is [out, in] unless a product says
  /// otherwise. Nothing if no such node uses it, or if they do not agree.
  std::optional<SourceLayout> LayoutOf(std::string_view value) const;

 private:
  struct Found {
    bool in_out = false;
    bool out_in = false;
    bool likely_out_in = false;  ///< Looked up by rows, or transposed for an unknown user.
    int nodes = 0;               ///< Visited so far.
  };
  void Find(std::string_view value, bool transposed, Found* found) const;
  void FindIn(const OnnxNode& node, std::string_view value, bool transposed, Found* found) const;

  std::unordered_map<std::string_view, std::vector<const OnnxNode*>> consumers_;
};

}  // namespace marlin
