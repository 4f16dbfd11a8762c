// The Hugging Face name of each tensor of a GGUF file, by architecture.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace marlin {

/// The names of a GGUF architecture elsewhere, and how its tensors differ.
struct GgufArchitecture {
  std::string_view name;         ///< general.architecture.
  std::string_view model_type;   ///< In config.json, without experts.
  std::string_view expert_type;  ///< The same with experts; empty: no other.
  bool paired_heads = false;     ///< Rows of q and k are in pairs that RoPE rotates, see HeadRows.
};

/// Null for an architecture whose tensors keep their names.
const GgufArchitecture* FindGgufArchitecture(std::string_view name);

/// Where a tensor of a file belongs.
struct GgufPlace {
  enum class Rows : uint8_t { kStraight, kQueryHeads, kKeyHeads };
  /// The name in a Hugging Face checkpoint; with "*" for the number of an expert.
  std::string name;
  bool experts = false;  ///< A stack of matrices, one for each expert.
  Rows rows = Rows::kStraight;
  bool as_row = false;  ///< A vector that is a matrix of one row elsewhere.
};

/// The place of a tensor; the name itself where the architecture has no such tensor. `with_experts`
/// says whether the model has experts.
GgufPlace PlaceGgufTensor(const GgufArchitecture& architecture, bool with_experts,
                          std::string_view name);

/// The architecture of a model_type of config.json, and whether it is the one with experts. Null
/// for one that has none.
const GgufArchitecture* FindGgufArchitectureOf(std::string_view model_type, bool* with_experts);

/// All types of which a file may hold a model, in order.
std::vector<std::string_view> GgufModelTypes();

/// The name in a file of a tensor of a Hugging Face checkpoint, the inverse of PlaceGgufTensor;
/// nothing if the architecture has no such tensor.
std::optional<std::string> GgufTensorName(const GgufArchitecture& architecture, bool with_experts,
                                          std::string_view name);

/// The two stacks of gpt-oss that are one elsewhere, rows in turn: "blk.3.ffn_gate_exps.weight"
/// gives the name of the partner that holds the odd rows. Nothing for all other tensors.
std::optional<std::string> GgufInterleavedPartner(const GgufArchitecture& architecture,
                                                  std::string_view name);

/// Row r of a head of `head_dim` rows is stored at this row: llama's converter puts the two rows
/// that RoPE rotates together next to each other, Hugging Face half a head apart.
constexpr int64_t HeadRow(int64_t row, int64_t head_dim) {
  const int64_t head = row / head_dim * head_dim;
  const int64_t in_head = row % head_dim;
  const int64_t half = head_dim / 2;
  return head + in_head % half * 2 + in_head / half;
}

}  // namespace marlin
