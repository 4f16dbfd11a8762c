// Token sampling: penalties, then greedy, or a draw after temperature, top-k, top-p and min-p.
#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <new>
#include <numeric>

#include "backends/cpu/decoder/cpu_decoder.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "plan/integers/sample_weights.h"
#include "plan/step/indices.h"
#include "plan/step/sample_marks.h"
#include "plan/step/sampler_states.h"

namespace marlin::cpu {
namespace {

using kernels::DrawOptions;
using kernels::InverseOf;
using kernels::NextRandom;
using kernels::PenalizedLogit;
using kernels::Penalizes;
using kernels::SamplerState;
using kernels::ScaleOf;
using kernels::SeenTokens;
using kernels::ShareOf;
using kernels::ShareOfRandom;
using kernels::WeightBits;
using kernels::WeightOf;
using kernels::WeightScale;

/// Scratch memory of one worker.
struct Scratch {
  uint64_t* weights;  ///< Per token (sample_weights.h).
  int32_t* order;     ///< Tokens; a prefix is sorted, most likely first.
  float* logits;      ///< Logits after penalties.

  static int64_t Bytes(int64_t vocab) { return RoundUp(16 * vocab, kBufferAlignment); }
  static Scratch At(void* memory, int64_t vocab) {
    auto* const weights = static_cast<uint64_t*>(memory);
    auto* const order = reinterpret_cast<int32_t*>(weights + vocab);
    return {weights, order, reinterpret_cast<float*>(order + vocab)};
  }
};

/// Finds the most likely token, or a mark; ties take the lowest id.
int32_t FindBest(const float* logits, int64_t vocab) {
  int64_t best = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    // NaN or +Inf. -Inf is allowed: it masks a token.
    if (!(logits[i] < std::numeric_limits<float>::infinity())) {
      return LogitMark(static_cast<int32_t>(i), std::isinf(logits[i]));
    }
    if (logits[i] > logits[best]) best = i;
  }
  return std::isinf(logits[best]) ? kNoLogitMark : static_cast<int32_t>(best);
}

/// One draw from one sampler state.
class Draw {
 public:
  /// `allowed`: bits, or null.
  Draw(SamplerState* state, const float* logits, const uint32_t* allowed, const Scratch& scratch)
      : state_(*state),
        options_(state->options),
        vocab_(state->vocab),
        logits_(logits),
        allowed_(allowed),
        scratch_(scratch) {}

  /// The token, or a mark, with which the state does not advance.
  int32_t Run() {
    if (Penalizes(options_)) Penalize();
    if (allowed_ != nullptr) Mask();
    const int32_t best = FindBest(logits_, vocab_);
    if (best < 0) return best == kNoLogitMark && allowed_ != nullptr ? kMaskMark : best;
    const int32_t drawn = options_.temperature == 0.0F ? best : DrawLikely(logits_[best]);
    SeenTokens(&state_)[drawn] += 2;
    return drawn;
  }

 private:
  void Penalize() {
    const uint32_t* const seen = SeenTokens(&state_);
    for (int64_t i = 0; i < vocab_; ++i) {
      scratch_.logits[i] = std::bit_cast<float>(
          PenalizedLogit(std::bit_cast<uint32_t>(logits_[i]), seen[i], options_));
    }
    logits_ = scratch_.logits;
  }

  /// Excludes the tokens that are not allowed. Logits that are no numbers stay: they are an error.
  void Mask() {
    for (int64_t i = 0; i < vocab_; ++i) {
      const bool allowed = (allowed_[i / 32] >> (i % 32) & 1U) != 0;
      const bool excluded = !allowed && logits_[i] < std::numeric_limits<float>::infinity();
      scratch_.logits[i] = excluded ? -std::numeric_limits<float>::infinity() : logits_[i];
    }
    logits_ = scratch_.logits;
  }

  int32_t DrawLikely(float largest) {
    std::iota(scratch_.order, scratch_.order + vocab_, 0);
    const WeightScale scale =
        ScaleOf(std::bit_cast<uint32_t>(largest), InverseOf(options_.temperature),
                WeightBits(static_cast<int>(vocab_)));
    kept_ = options_.top_k == 0 ? vocab_ : std::min(options_.top_k, vocab_);
    if (kept_ < vocab_) SortFirst(kept_);
    for (int64_t i = 0; i < kept_; ++i) {
      const int32_t token = scratch_.order[i];
      scratch_.weights[token] = WeightOf(std::bit_cast<uint32_t>(logits_[token]), scale);
    }
    if (options_.top_p != 1.0F) kept_ = Find(ShareOf(options_.top_p, Sum()) - 1) + 1;
    least_ = ShareOf(options_.min_p, uint64_t{1} << scale.bits);
    return scratch_.order[Find(ShareOfRandom(NextRandom(&state_), Sum()))];
  }

  uint64_t WeightAt(int64_t place) const {
    const uint64_t weight = scratch_.weights[scratch_.order[place]];
    return weight < least_ ? 0 : weight;
  }

  uint64_t Sum() const {
    uint64_t sum = 0;
    for (int64_t i = 0; i < kept_; ++i) sum += WeightAt(i);
    return sum;
  }

  /// The place at which the sum of the weights exceeds `mass`, which is less than all of them.
  int64_t Find(uint64_t mass) {
    for (int64_t place = 0;; ++place) {
      // Few tokens hold most of the mass, so sort a growing prefix: sorting a whole large
      // vocabulary would take longer than the draw.
      constexpr int64_t kFirstSorted = 64;
      if (place == sorted_) SortFirst(std::min(kept_, std::max(kFirstSorted, 8 * sorted_)));
      const uint64_t weight = WeightAt(place);
      if (mass < weight) return place;
      mass -= weight;
    }
  }

  /// Sorts the `count` most likely tokens to the front of the order; ties by token id.
  void SortFirst(int64_t count) {
    std::partial_sort(scratch_.order + sorted_, scratch_.order + count, scratch_.order + vocab_,
                      [this](int32_t a, int32_t b) {
                        const float x = logits_[a];
                        const float y = logits_[b];
                        return x > y || (x == y && a < b);
                      });
    sorted_ = count;
  }

  SamplerState& state_;
  const DrawOptions& options_;
  int64_t vocab_;
  const float* logits_;
  const uint32_t* allowed_;
  Scratch scratch_;
  int64_t sorted_ = 0;  ///< Length of the sorted prefix of the order.
  int64_t kept_ = 0;    ///< Tokens of the order that may be drawn ...
  uint64_t least_ = 0;  ///< ... if they have this weight.
};

SamplerState* StateOf(const MutableTensorView& states, int64_t row) {
  return reinterpret_cast<SamplerState*>(states.As<uint8_t>() + row * states.stride(0));
}

/// The state of a row of a call, or a negative number.
int64_t StateRowOf(const SampleTokensCall& call, int64_t row) {
  return call.state_rows.empty() ? row : IndexAt(call.state_rows, row);
}

Status CheckStates(const SampleTokensCall& call, int64_t vocab) {
  for (int64_t i = 0; i < call.logits.dim(0); ++i) {
    const int64_t row = StateRowOf(call, i);
    if (row < 0) continue;
    if (row >= call.states.dim(0)) {
      return Status(Code::kInvalidArgument,
                    fmt::format("state_rows: expected less than {}, got {} at {}",
                                call.states.dim(0), row, i));
    }
    const SamplerState* const state = StateOf(call.states, row);
    if (state->magic == kernels::kSamplerMagic && state->vocab == vocab) continue;
    return Status(Code::kInvalidArgument,
                  fmt::format("states: row {} was not reset for {} tokens", row, vocab));
  }
  return {};
}

/// Samples a row, or marks it.
int32_t SampleRow(const SampleTokensCall& call, int64_t row, const Scratch& scratch) {
  const float* const logits = call.logits.As<float>() + row * call.logits.stride(0);
  const int64_t mask = call.allowed.empty() ? -1 : IndexAt(call.allowed_rows, row);
  if (mask >= 0 && mask >= call.allowed.dim(0)) return kMaskRowMark;
  const uint32_t* const allowed =
      mask < 0 ? nullptr : call.allowed.As<uint32_t>() + mask * call.allowed.dim(1);
  return Draw(StateOf(call.states, StateRowOf(call, row)), logits, allowed, scratch).Run();
}

/// The draft of a row, or a negative number.
int64_t DraftOf(const SampleTokensCall& call, int64_t row) {
  return call.drafts.empty() || row < 0 || row + 1 == call.logits.dim(0)
             ? -1
             : IndexAt(call.drafts, row);
}

/// Samples a row and, while the tokens are the drafts, the rows that follow it.
void SampleSequence(const SampleTokensCall& call, int64_t row, const Scratch& scratch) {
  if (StateRowOf(call, row) < 0 || DraftOf(call, row - 1) >= 0) return;
  auto* const tokens = call.tokens.As<int32_t>();
  bool goes_on = true;
  for (bool last = false; !last; ++row) {
    last = DraftOf(call, row) < 0;
    if (!goes_on) {
      tokens[row] = kSkippedMark;
      continue;
    }
    tokens[row] = SampleRow(call, row, scratch);
    goes_on = tokens[row] == DraftOf(call, row);
  }
}

/// Takes the token sampled for a row, unless it has ended.
Status AdvanceRow(const AdvanceTokensCall& call, int64_t row) {
  int32_t& state_row = call.state_rows.As<int32_t>()[row];
  if (state_row < 0) return {};
  const int64_t steps = call.tokens.dim(1);
  const int32_t token = call.sampled.As<int32_t>()[row];
  int32_t& count = call.counts.As<int32_t>()[row];
  if (count < 0 || count >= steps) {
    return Status(Code::kInvalidArgument,
                  fmt::format("counts: expected 0..{}, got {} at {}", steps - 1, count, row));
  }
  if (token < 0) {
    state_row = token;
    return {};
  }
  call.tokens.As<int32_t>()[row * steps + count++] = token;
  ++call.positions.As<int32_t>()[row];
  const auto* const stops = call.stop_ids.As<int32_t>();
  if (std::find(stops, stops + call.stop_ids.dim(0), token) != stops + call.stop_ids.dim(0)) {
    state_row = -1;
  } else {
    call.ids.As<int32_t>()[row] = token;
  }
  return {};
}

}  // namespace

int64_t CpuDecoder::sampler_state_bytes(int64_t vocab) const { return SamplerBytes(vocab); }

Status CpuDecoder::Run(const ResetSamplerCall& call, const OperationContext& /*context*/) const {
  MARLIN_RETURN_IF_ERROR(CheckIndices("prompt", call.prompt, call.vocab));
  auto* const state = new (call.state.data())
      SamplerState{kernels::kSamplerMagic, call.vocab, DrawOptionsOf(call.options), {}, 0};
  kernels::SeedRandom(state, call.options.seed);
  uint32_t* const seen = SeenTokens(state);
  std::fill_n(seen, call.vocab, 0U);
  for (int64_t i = 0; i < call.prompt.dim(0); ++i) seen[IndexAt(call.prompt, i)] = 1;
  return {};
}

int64_t CpuDecoder::WorkspaceBytes(const SampleTokensCall& call) const {
  return pool_.worker_count() * Scratch::Bytes(call.logits.dim(1));
}

Status CpuDecoder::Run(const SampleTokensCall& call, const OperationContext& context) const {
  const auto& logits = call.logits;
  const int64_t vocab = logits.dim(1);
  MARLIN_RETURN_IF_ERROR(CheckStates(call, vocab));
  pool_.Run(logits.dim(0), [&](int64_t row, int worker) {
    void* const memory = static_cast<uint8_t*>(context.workspace) + worker * Scratch::Bytes(vocab);
    SampleSequence(call, row, Scratch::At(memory, vocab));
  });
  for (int64_t row = 0; row < logits.dim(0) && !call.marks; ++row) {
    if (StateRowOf(call, row) < 0) continue;
    Status error = SampleError(call.tokens.As<int32_t>()[row]);
    if (error.ok()) continue;
    if (call.states.dim(0) == 1) return error;
    return error.WithContext(fmt::format("row {}", StateRowOf(call, row)));
  }
  return {};
}

Status CpuDecoder::Run(const AdvanceTokensCall& call, const OperationContext& /*context*/) const {
  for (int64_t row = 0; row < call.sampled.dim(0); ++row) {
    MARLIN_RETURN_IF_ERROR(AdvanceRow(call, row));
  }
  return {};
}

}  // namespace marlin::cpu
