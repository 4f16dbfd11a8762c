// Sampler states as host and Metal devices have them (plan/integers/sampler_state.h).
#pragma once

#include <cstdint>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "marlin/sampling.h"
#include "plan/integers/sampler_state.h"

namespace marlin {

inline int64_t SamplerBytes(int64_t vocab) {
  return RoundUp(int64_t{sizeof(kernels::SamplerState)} + vocab * int64_t{sizeof(uint32_t)},
                 kBufferAlignment);
}

inline kernels::DrawOptions DrawOptionsOf(const SamplingOptions& options) {
  return {options.top_k,
          options.seed,
          options.temperature,
          options.top_p,
          options.min_p,
          options.repetition_penalty,
          options.presence_penalty,
          options.frequency_penalty};
}

}  // namespace marlin
