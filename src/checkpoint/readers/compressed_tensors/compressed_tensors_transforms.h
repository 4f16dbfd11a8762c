// Rotations of compressed-tensors ("transform_config"): of weights, which are stored rotated, and
// of activations, which a program applies when it runs the model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "checkpoint/files/tensor_store.h"
#include "marlin/status.h"

namespace marlin {

/// Whether a target, a name, "re:" and an expression or the class of a module, names the module.
bool MatchesTarget(const std::string& target, const std::string& base);

/// The rotations of linear layers' inputs, as online transforms at the location "input" of type
/// "hadamard", whose matrices are Sylvester's. Rotations of queries and keys, which cancel, are for
/// programs that quantize the cache.
class CtTransforms {
 public:
  /// `where` begins errors. Errors: kUnsupported for online transforms of other types and
  /// locations; kMalformedFile.
  static Result<CtTransforms> Parse(const Json& config, const std::string& where);

  /// The size of the Hadamard blocks that rotate the inputs of a module with k of them; 0: none.
  /// Errors: kUnsupported for a size that is no power of two, and for two rotations.
  Result<int64_t> HadamardOf(const std::string& base, int64_t k) const;

  /// Removes the transforms' matrices, which are known, from the tensors of a checkpoint. Errors:
  /// from ReplaceTensors.
  Status DropMatrices(TensorStore* store) const;

  bool rotates_inputs() const { return !inputs_.empty(); }

  /// Errors: kUnsupported for an unquantized linear layer whose inputs are rotated.
  Status CheckPlain(const TensorStore& store) const;

 private:
  struct Input {
    std::vector<std::string> targets;
    std::vector<std::string> ignored;
    int64_t head_dim = 0;  ///< The size of blocks; 0: all inputs.
  };
  Status AddScheme(const std::string& name, const Json& scheme);
  bool IsMatrix(const std::string& name) const;
  bool Names(const Input& input, const std::string& base) const;

  std::string where_;
  std::vector<Input> inputs_;
  std::vector<std::string> suffixes_;  ///< The ends of names of the transforms' matrices.
};

}  // namespace marlin
