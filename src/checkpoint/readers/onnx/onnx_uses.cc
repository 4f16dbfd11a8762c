#include "checkpoint/readers/onnx/onnx_uses.h"

#include <algorithm>
#include <iterator>

namespace marlin {
namespace {

/// Nodes whose output is their first input in another type.
bool KeepsValues(const OnnxNode& node) {
  constexpr std::string_view kOps[] = {"Identity", "Cast", "CastLike", "QuantizeLinear",
                                       "DequantizeLinear"};
  return std::find(std::begin(kOps), std::end(kOps), node.op) != std::end(kOps);
}

/// Whether a Transpose exchanges the last two dimensions; nothing if it moves others.
std::optional<bool> Exchanges(const std::vector<int64_t>& permutation) {
  // The default reverses all dimensions; what it does to three or more is no transposed matrix.
  if (permutation.empty()) return true;
  const size_t rank = permutation.size();
  if (rank < 2) return std::nullopt;
  for (size_t i = 0; i + 2 < rank; ++i) {
    if (permutation[i] != static_cast<int64_t>(i)) return std::nullopt;
  }
  return permutation[rank - 1] != static_cast<int64_t>(rank - 1);
}

}  // namespace

OnnxUses::OnnxUses(const std::vector<OnnxNode>& nodes) {
  for (const OnnxNode& node : nodes) {
    for (const std::string_view input : node.inputs) {
      if (!input.empty()) consumers_[input].push_back(&node);
    }
  }
}

void OnnxUses::Find(std::string_view value, bool transposed, Found* found) const {
  // Bounds the time for files of many users, and for cycles, which valid graphs do not have.
  constexpr int kMostNodes = 256;
  const auto consumers = consumers_.find(value);
  if (consumers == consumers_.end()) return;
  for (const OnnxNode* node : consumers->second) {
    if (++found->nodes > kMostNodes) return;
    FindIn(*node, value, transposed, found);
  }
}

void OnnxUses::FindIn(const OnnxNode& node, std::string_view value, bool transposed,
                      Found* found) const {
  const std::string_view output = node.outputs.empty() ? std::string_view() : node.outputs.front();
  if (node.op == "Transpose") {
    const std::optional<bool> exchanges = Exchanges(node.permutation);
    if (!exchanges) return;
    if (*exchanges && !transposed) found->likely_out_in = true;
    return Find(output, transposed != *exchanges, found);
  }
  if (KeepsValues(node) && node.Input(0) == value) {
    return Find(output, transposed, found);
  }
  if (node.op == "Gather") {
    const bool rows = node.Input(0) == value && node.Integer("axis", 0) == 0;
    if (rows && !transposed) found->likely_out_in = true;
    return;
  }
  if (node.op == "Attention" && node.domain == "com.microsoft") {
    // Its input 1 is q_proj, k_proj and v_proj, [in, out].
    if (node.Input(1) == value) (transposed ? found->out_in : found->in_out) = true;
    return;
  }
  const bool gemm = node.op == "Gemm" || node.op == "FusedGemm" || node.op == "FusedMatMul";
  if (!gemm && node.op != "MatMul") return;
  const bool left = node.Input(0) == value;
  if (left == (node.Input(1) == value)) return;  // Neither, or a square of the matrix.
  // x W has W [in, out]; W x has W [out, in].
  const bool flipped = gemm && node.Integer(left ? "transA" : "transB", 0) != 0;
  const bool in_out = (left != flipped) == transposed;
  (in_out ? found->in_out : found->out_in) = true;
}

std::optional<SourceLayout> OnnxUses::LayoutOf(std::string_view value) const {
  Found found;
  Find(value, false, &found);
  if (found.in_out != found.out_in) {
    return found.in_out ? SourceLayout::kInOut : SourceLayout::kOutIn;
  }
  if (found.likely_out_in && !found.in_out) return SourceLayout::kOutIn;
  return std::nullopt;
}

}  // namespace marlin
