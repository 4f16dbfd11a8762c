#include "engine/batch/sampler_slots.h"

#include <utility>

#include "base/macros.h"

namespace marlin {

Result<SamplerSlots> SamplerSlots::Make(const Device& device, int64_t vocab, int64_t most) {
  MARLIN_ASSIGN_OR_RETURN(const int64_t bytes, SamplerStateBytes(device, vocab));
  SamplerSlots slots(device, vocab, bytes);
  for (slots.count_ = most;; slots.count_ /= 2) {
    Result<DeviceBuffer> states = DeviceBuffer::Allocate(device, slots.count_ * bytes);
    if (states.ok()) {
      slots.states_ = *std::move(states);
      return slots;
    }
    if (states.status().code() != Code::kOutOfMemory || slots.count_ <= 1) return states.status();
  }
}

MutableTensorView SamplerSlots::First(int64_t used) const {
  return {states_.data(), DType::kU8, {used, bytes_}};
}

MutableTensorView SamplerSlots::At(int64_t slot) const {
  return {static_cast<uint8_t*>(states_.data()) + slot * bytes_, DType::kU8, {1, bytes_}};
}

Status SamplerSlots::ResetAll(std::span<const Reset> resets) {
  if (resets.empty()) return {};
  std::vector<int32_t> tokens;
  for (const Reset& reset : resets) {
    tokens.insert(tokens.end(), reset.prompt.begin(), reset.prompt.end());
  }
  const auto bytes = static_cast<int64_t>(std::span(tokens).size_bytes());
  if (prompts_.bytes() < bytes) {
    prompts_ = DeviceBuffer();
    MARLIN_ASSIGN_OR_RETURN(prompts_, DeviceBuffer::Allocate(device_, bytes));
  }
  MARLIN_RETURN_IF_ERROR(prompts_.CopyFrom(tokens.data(), bytes));
  auto* prompt = static_cast<int32_t*>(prompts_.data());
  for (const Reset& reset : resets) {
    const TensorView view(prompt, DType::kI32, {static_cast<int64_t>(reset.prompt.size())});
    auto* const state = static_cast<uint8_t*>(states_.data()) + reset.slot * bytes_;
    MARLIN_RETURN_IF_ERROR(
        ResetSampler(device_, *reset.options, vocab_, view, {state, DType::kU8, {bytes_}}));
    prompt += reset.prompt.size();
  }
  return {};
}

Result<std::vector<uint8_t>> SamplerSlots::Save(int64_t slot) const {
  std::vector<uint8_t> state(static_cast<size_t>(bytes_));
  MARLIN_RETURN_IF_ERROR(states_.CopyTo(state.data(), bytes_, slot * bytes_));
  return state;
}

Status SamplerSlots::Restore(int64_t slot, std::span<const uint8_t> state) {
  return states_.CopyFrom(state.data(), bytes_, slot * bytes_);
}

Status SamplerSlots::Move(int64_t from, int64_t to) {
  MARLIN_ASSIGN_OR_RETURN(const std::vector<uint8_t> state, Save(from));
  return Restore(to, state);
}

}  // namespace marlin
