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
  std::string_view name;              ///< general.architecture.
  std::string_view model_type;        ///< In config.json, without experts.
  std::string_view expert_type = {};  ///< The same with experts; empty: no other.
  bool paired_heads = false;          ///< Rows of q and k are in pairs that RoPE rotates: HeadRow.
  /// The type of what is read, where it names the tensors as the files do; empty: model_type.
  std::string_view read_type = {};
  bool tiled_values = false;  ///< Value heads of a gated delta net lie as TiledHead says.
};

/// The names of one model's tensors.
struct GgufNaming {
  const GgufArchitecture* architecture = nullptr;
  std::string_view type;  ///< The model_type whose names these are; of another architecture, too.
  int64_t layers = 0;     ///< Layers from here on predict further tokens; 0: it is not known.

  bool known() const { return architecture != nullptr; }
};

/// Null for an architecture whose tensors keep their names.
const GgufArchitecture* FindGgufArchitecture(std::string_view name);

/// The names in a file that is read, with experts or without.
GgufNaming ReadGgufNaming(const GgufArchitecture& architecture, bool with_experts);

/// The names in a file of a model of a model_type of config.json; not known() without an
/// architecture.
GgufNaming GgufNamingOf(std::string_view model_type);

/// All types of which a file may hold a model, in order.
std::vector<std::string_view> GgufModelTypes();

/// Where a tensor of a file belongs.
struct GgufPlace {
  /// The rows of the tensor elsewhere that it holds, or of whose rows it has those, and their
  /// order.
  enum class Rows : uint8_t {
    kStraight,
    kQueryHeads,
    kKeyHeads,
    kEven,        ///< The tensor elsewhere has rows of gate and up in turn: it holds gate's.
    kOdd,         ///< It holds up's.
    kFirstHalf,   ///< The tensor elsewhere has gate's rows, then up's.
    kSecondHalf,  ///< It holds up's.
    kValueHeads,  ///< Value heads of a gated delta net.
    kMixedHeads,  ///< Queries and keys of one, then the values.
    // Parts of a projection of a gated delta net that has one key head after another.
    kQkvOfHeads,
    kGatesOfHeads,
    kWritesOfHeads,
    kDecaysOfHeads,
  };
  /// The value in the file of a value w elsewhere.
  enum class Values : uint8_t { kSame, kPlusOne, kNegativeExp };

  /// The name in a Hugging Face checkpoint; with "*" for the number of an expert.
  std::string name;
  bool experts = false;    ///< A stack of matrices, one for each expert.
  bool one_stack = false;  ///< The experts are one tensor elsewhere, too.
  Rows rows = Rows::kStraight;
  bool value_columns = false;  ///< Columns are value heads of a gated delta net.
  bool as_row = false;         ///< A vector that is a matrix of one row elsewhere.
  bool taps =
      false;  ///< A depthwise convolution [channels, width], elsewhere [channels, 1, width].
  Values values = Values::kSame;
};

/// The places of a tensor: several where it holds what is several tensors elsewhere; its own name
/// where the architecture has no such tensor.
std::vector<GgufPlace> PlacesOfGgufTensor(const GgufNaming& naming, std::string_view name);

/// A tensor of a file, and where it belongs.
struct GgufTensorOf {
  std::string name;
  GgufPlace place;
};

/// The tensors of a file that hold a tensor of a Hugging Face checkpoint, or that are parts of it,
/// the inverse of PlacesOfGgufTensor; empty if the architecture has none.
std::vector<GgufTensorOf> GgufTensorsOf(const GgufNaming& naming, std::string_view name);

/// The stack of up projections that is one tensor with a stack of gates elsewhere:
/// "blk.3.ffn_gate_exps.weight" gives its partner's name. Nothing for all other tensors.
std::optional<std::string> GgufUpPartner(const GgufNaming& naming, std::string_view name);

}  // namespace marlin
