// A mixer: what mixes the tokens of a sequence in a layer, such as attention. Everything that
// depends on the kind of a mixer is asked here; a kind is a folder of engine/mixers/ and a row of
// recipe/mixers.def.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/model.h"
#include "marlin/status.h"
#include "model/decoder_config.h"
#include "model/layers.h"
#include "plan/step/decoder_backend.h"
#include "plan/step/decoder_step.h"
#include "recipe/mixer.h"

namespace marlin {

struct Pass;            // engine/forward.h
struct DescribedLayer;  // engine/describe_step.h

/// An operation by which a mixer takes part in a step, and the device operations that run it where
/// the device does not fuse it.
struct MixerOperation {
  StepKind kind;
  std::vector<DecoderOperation> unfused;
};

/// The rows of a pass that belong to one sequence, its keys after them, and how many of the rows,
/// all but the first, are guesses.
struct PassSequence {
  int64_t rows = 0;
  int64_t length = 0;
  int64_t drafts = 0;
};

/// The facts that all passes of a model share.
struct PassSetting {
  const Device& device;
  const DecoderConfig& config;
  DType cache_type = DType::kF32;
  Accuracy accuracy = Accuracy::kDefault;
  Determinism determinism = Determinism::kDefault;
  int64_t page_tokens = 0;
};

/// Before a model is loaded: without page_tokens.
PassSetting SettingOf(const Device& device, const DecoderConfig& config,
                      const ModelOptions& options, DType cache_type);

/// The pages that a pass expands, as in ExpandedPages; without pages it expands none.
struct ExpandedTables {
  std::vector<int32_t> pages;
  std::vector<int32_t> tokens;
  std::vector<int32_t> block_tables;  ///< [sequences, blocks]
};

class Mixer : public MixerParameters {
 public:
  /// The operations of a step from `hidden` to `mixed`, in order.
  virtual std::vector<MixerOperation> Operations() const = 0;

  /// The device operations that layers of some sizes need in addition.
  virtual std::vector<DecoderOperation> OwnOperations(const Dimensions& /*sizes*/) const {
    return {};
  }

  // Loading.

  /// Converts loaded projections to MixerLayer::converted; the ones that it replaces become empty.
  /// `exact`: nothing is rounded. Errors: kOutOfMemory, kDeviceLost.
  virtual Status Convert(const Device& /*device*/, const Dimensions& /*sizes*/, bool /*exact*/,
                         MixerLayer* /*layer*/) const {
    return {};
  }
  /// Bytes on a device of a layer's converted parameters; 0: there are none, and Convert is not
  /// called.
  virtual int64_t ConvertedBytes(const Dimensions& /*sizes*/, bool /*exact*/) const { return 0; }
  /// Bytes on a device of the pages that a pass expands, one layer at a time.
  virtual int64_t ExpandedBytes(const PassSetting& /*setting*/) const { return 0; }

  // Running.

  /// Describes Operations() for a layer.
  virtual void Describe(const DescribedLayer& layer,
                        std::vector<StepOperation>* operations) const = 0;
  /// Allocates the values between the mixer's operations from the pass's arena. Errors:
  /// kOutOfMemory.
  virtual Status TakeValues(Pass* /*pass*/) const { return {}; }
  /// Runs one of Operations(), unfused. The first one gives Pass::inputs the inputs that it
  /// computes for projections.
  virtual Status Run(Pass& pass, StepKind kind, int64_t layer) const = 0;

  /// Whether passes of such sequences expand what their pages hold. Decode steps that are recorded
  /// together must not differ in this.
  virtual bool Expands(const PassSetting& /*setting*/,
                       std::span<const PassSequence> /*sequences*/) const {
    return false;
  }
  /// The tables of a pass that Expands. `block_tables`: [sequences, blocks], as in SequenceRows.
  virtual ExpandedTables Expand(const PassSetting& /*setting*/,
                                std::span<const PassSequence> /*sequences*/,
                                std::span<const int32_t> /*block_tables*/) const {
    return {};
  }
};

const Mixer& MixerOf(MixerKind kind);

/// The bytes that the mixers of a model's layers from `first` on take on a device in addition to
/// weights and KV cache.
int64_t MixerBytes(const PassSetting& setting, int64_t first = 0);

}  // namespace marlin
