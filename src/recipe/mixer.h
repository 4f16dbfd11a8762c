// The parameters of a mixer as a checkpoint and a recipe see them, and the state of a sequence.
// model/mixer.h adds what a loaded model asks.
#pragma once

#include <cstdint>
#include <vector>

#include "marlin/tensor.h"
#include "recipe/decoder_shape.h"
#include "recipe/decoder_tensors.h"
#include "recipe/model_config.h"

namespace marlin {

// Far above every published model, low enough that a product of any three fits in an int64.
inline constexpr int64_t kMaxWidth = int64_t{1} << 20;
inline constexpr int64_t kMaxHeads = int64_t{1} << 12;

/// The state that a sequence keeps of a layer: keys and values of every token, in pages
/// (PagedCache), or a recurrent state of fixed size (RecurrentStates).
struct MixerState {
  int64_t heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  bool values_in_keys = false;  ///< As in PagedCache.
  int64_t fixed = 0;            ///< Elements of a recurrent state, f32; without keys and values.

  /// Elements of a token's keys and values.
  int64_t elements() const {
    return SaturatingProduct(heads, key_dim + (values_in_keys ? 0 : value_dim));
  }
  friend bool operator==(const MixerState&, const MixerState&) = default;
};

class MixerParameters {
 public:
  virtual ~MixerParameters() = default;
  /// Reads and checks the sizes of the mixer; reports errors to the config.
  virtual void ReadSizes(const Family& family, ModelConfig& config, Dimensions* sizes) const = 0;
  /// A layer's tensors.
  virtual MixerTensors Tensors(const Family& family, const Dimensions& sizes,
                               const LayerNames& names) const = 0;
  /// Origins of the inputs that a layer's mixer computes: ProjectionTensors::input 1, 2, ..., and
  /// last the input of `out`.
  virtual std::vector<InputSource> Sources(const Dimensions& sizes,
                                           const MixerTensors& tensors) const = 0;
  virtual MixerState State(const Dimensions& sizes) const = 0;
  /// Elements that prefill expands a token's state to, in one layer; 0: it does not.
  virtual int64_t ExpandedElements(const Dimensions& /*sizes*/) const { return 0; }

  /// Features of a head to which RoPE applies; 0: none.
  virtual int64_t RotaryDim(const Dimensions& /*sizes*/) const { return 0; }
  /// Whether the config says that rotated pairs are neighbors, in addition to
  /// Family::interleaved_rotary.
  virtual bool InterleavesRotary(ModelConfig& /*config*/) const { return false; }
  /// Epsilon of the norms of MixerTensors::vectors, where the config does not set it.
  virtual float NormEpsilon() const { return 0.0F; }
  /// Factor of the scores of queries and keys; `rotary` is Rotary::score_factor.
  virtual float ScoreScale(const Dimensions& /*sizes*/, float /*rotary*/) const { return 1.0F; }
};

const MixerParameters& ParametersOf(MixerKind kind);

/// Reads the heads, and the biases and norms of queries, keys and values by the family's rules.
void ReadHeads(const Family& family, ModelConfig& config, Dimensions* sizes);

}  // namespace marlin
