// The sampler states of a batch whose sequences come and go.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/device.h"
#include "marlin/sampling.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// Sampler states in device memory, one after another: slot i is for input i of a call.
class SamplerSlots {
 public:
  /// Allocates `most` slots, or fewer if the memory does not suffice. Errors: kUnsupported,
  /// kOutOfMemory for one slot.
  static Result<SamplerSlots> Make(const Device& device, int64_t vocab, int64_t most);

  int64_t count() const { return count_; }
  /// The states of the first slots, u8 [used, SamplerStateBytes].
  MutableTensorView First(int64_t used) const;
  /// The state of one slot, u8 [1, SamplerStateBytes].
  MutableTensorView At(int64_t slot) const;

  /// The state of a sequence that samples its first token.
  struct Reset {
    int64_t slot = 0;
    const SamplingOptions* options = nullptr;
    std::span<const int32_t> prompt;
  };
  /// Initializes the states of several sequences: one copy for all prompts, and no other wait.
  Status ResetAll(std::span<const Reset> resets);
  /// Copies a state to the host, for a sequence that is put back, and into a slot again.
  Result<std::vector<uint8_t>> Save(int64_t slot) const;
  Status Restore(int64_t slot, std::span<const uint8_t> state);
  Status Move(int64_t from, int64_t to);

 private:
  SamplerSlots(const Device& device, int64_t vocab, int64_t bytes)
      : device_(device), vocab_(vocab), bytes_(bytes) {}

  Device device_;
  int64_t vocab_;
  int64_t bytes_;  ///< Size of one state.
  int64_t count_ = 0;
  DeviceBuffer states_;
  DeviceBuffer prompts_;
};

}  // namespace marlin
