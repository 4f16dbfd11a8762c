// Token sampling: penalties, then greedy, or a draw after temperature, top-k, top-p and min-p. A
// cluster takes a row, because one SM alone loads a vocabulary's logits slowly; before 9.0 a CTA.
//
//   Tokens are ordered by logit, the most likely first, ties by id. top-k and top-p keep a prefix
//   of that order, which a Cut ends; a draw is the token at which the cumulative weight exceeds a
//   random number. All three find the token of a cumulative weight: a radix search over the bits of
//   the logit, with a histogram of weights per level. Weights are integers, so that the order of
//   the additions does not matter and a seed gives the same tokens on every run.
#include <climits>
#include <cmath>

#include "backends/cuda/common/block_scan.cuh"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/decoder/operations.h"
#include "backends/cuda/plan/tile_problem.h"
#include "backends/cuda/rows/record_error.cuh"
#include "backends/cuda/sampling/logit_keys.cuh"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "plan/step/sample_marks.h"

namespace marlin::cuda {
namespace {

constexpr int kResetThreads = 1024;
constexpr int kDigitBits = 11;  ///< Bits of a level of the radix search.
constexpr int kBins = 1 << kDigitBits;
constexpr int kLevels = 3;

/// SamplingOptions.
struct SamplingView {
  float temperature = 0;
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  int64_t top_k = 0;
  uint64_t seed = 0;
};

/// The sampler state of a sequence in device memory. One uint32_t per token follows: the lowest bit
/// is set if the prompt has the token, the upper bits count how often it was drawn.
struct SamplerState {
  static constexpr uint64_t kMagic = 0x6d61726c696e7363;  ///< Marks memory that was reset.
  static constexpr int kWords = 312;
  uint64_t magic = 0;
  int64_t vocab = 0;
  SamplingView options;
  uint64_t random[kWords] = {};  ///< mt19937_64
  int next = kWords;

  MARLIN_HOST_DEVICE uint32_t* seen() { return reinterpret_cast<uint32_t*>(this + 1); }
};

struct ResetArguments {
  SamplingView options;
  SamplerState* state = nullptr;
  int64_t vocab = 0;
  const int32_t* prompt = nullptr;
  int64_t tokens = 0;
  ErrorView errors;
};

struct SampleArguments {
  const float* logits = nullptr;
  int64_t logits_stride = 0;
  uint8_t* states = nullptr;
  int64_t state_stride = 0;
  const int32_t* state_rows = nullptr;  ///< Null: row r has state r.
  int32_t* tokens = nullptr;
  int64_t tokens_stride = 1;
  int rows = 0;
  int states_count = 0;
  int vocab = 0;
  bool marks = false;                 ///< A row that cannot be sampled is marked, and no error.
  const uint32_t* allowed = nullptr;  ///< [masks, mask_words], or null.
  const int32_t* allowed_rows = nullptr;
  int masks = 0;
  int mask_words = 0;
  const int32_t* drafts = nullptr;  ///< Null: none.
  ErrorView errors;

  MARLIN_DEVICE int StateRowOf(int row) const {
    return state_rows == nullptr ? row : state_rows[row];
  }
  /// Negative: the next row is another sequence's.
  MARLIN_DEVICE int DraftOf(int row) const {
    return drafts == nullptr || row < 0 || row + 1 == rows ? -1 : drafts[row];
  }
};

/// The last token that is kept.
struct Cut {
  uint32_t key = 0;
  int id = INT_MAX;

  MARLIN_DEVICE bool Keeps(uint32_t other, int token) const {
    return other > key || (other == key && token <= id);
  }
};

/// mt19937_64, by one thread.
MARLIN_DEVICE uint64_t NextRandom(SamplerState* state) {
  constexpr int kWords = SamplerState::kWords;
  uint64_t* const words = state->random;
  if (state->next == kWords) {
    for (int i = 0; i < kWords; ++i) {
      const uint64_t mixed =
          (words[i] & ~0x7fffffffULL) | (words[(i + 1) % kWords] & 0x7fffffffULL);
      words[i] = words[(i + kWords / 2) % kWords] ^ (mixed >> 1) ^
                 ((mixed & 1) != 0 ? 0xb5026f5aa96619e9ULL : 0ULL);
    }
    state->next = 0;
  }
  uint64_t word = words[state->next++];
  word ^= (word >> 29) & 0x5555555555555555ULL;
  word ^= (word << 17) & 0x71d67fffeda60000ULL;
  word ^= (word << 37) & 0xfff7eee000000000ULL;
  return word ^ (word >> 43);
}

/// The best token and the first that is no number: both as keys of which the largest wins.
struct Best {
  unsigned long long key;  ///< Key of the logit, then the complement of the id.
  int bad;                 ///< The lowest id of a NaN or +Inf, or INT_MAX.
};

/// The logits of a row after penalties and its mask.
struct RowLogits {
  const float* logits;
  SamplerState* state;
  int mask;                 ///< Negative: none.
  const uint32_t* allowed;  ///< The words of the mask, or null.
  bool penalizes = false;

  MARLIN_DEVICE float At(int id) const { return Adjusted(logits[id], id); }

  /// Logits that are no numbers stay so: they are an error.
  MARLIN_DEVICE float Adjusted(float logit, int id) const {
    const float penalized = penalizes ? Penalized(logit, id) : logit;
    if (allowed == nullptr || (allowed[id / 32] >> (id % 32) & 1u) != 0) return penalized;
    return penalized < INFINITY ? -INFINITY : penalized;
  }

 private:
  MARLIN_DEVICE float Penalized(float logit, int id) const {
    const SamplingView& options = state->options;
    const uint32_t seen = state->seen()[id];
    if (seen != 0) {
      logit =
          logit > 0.0f ? logit / options.repetition_penalty : logit * options.repetition_penalty;
    }
    if (seen > 1) {
      const uint32_t times = seen / 2;
      logit -= options.presence_penalty + static_cast<float>(times) * options.frequency_penalty;
    }
    return logit;
  }
};

/// The logits of a row whose sampler has `state`.
MARLIN_DEVICE RowLogits LogitsOf(const SampleArguments& args, int row, SamplerState* state) {
  const int mask = args.allowed == nullptr ? -1 : args.allowed_rows[row];
  const uint32_t* const allowed =
      mask < 0 ? nullptr : args.allowed + static_cast<int64_t>(mask) * args.mask_words;
  return {args.logits + row * args.logits_stride, state, mask, allowed};
}

/// A barrier of the threads that take a row.
template <int kCluster>
MARLIN_DEVICE void SyncRow() {
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
    SyncCluster();
  }
}

/// The object of another CTA that takes the same row.
template <int kCluster, typename T>
MARLIN_DEVICE T& InBlock(T& object, int rank) {
  if constexpr (kCluster == 1) {
    return object;
  } else {
    return *ObjectInBlock(&object, rank);
  }
}

/// One row. All functions are called by all threads of the cluster, with the same arguments. A
/// token does not depend on the number of CTAs and threads.
template <int kCluster, int kThreads>
class RowSampler {
  static constexpr int kAllThreads = kCluster * kThreads;
  static constexpr int kWarps = kThreads / 32;

 public:
  struct Shared {
    unsigned long long bins[kBins];    ///< Weights of this CTA's tokens.
    unsigned long long totals[kBins];  ///< In rank 0: weights of all tokens.
    unsigned long long warp_keys[kWarps];
    int warp_bad[kWarps];
    int warp_sums[kWarps];
    Best best;               ///< The best of this CTA's tokens.
    unsigned long long sum;  ///< The weights of this CTA's tokens.
    int ties;                ///< Ties among this CTA's tokens.
    // All CTAs of the cluster write and read rank 0's copies of the members below.
    unsigned long long found;
    uint32_t digit;
    int id;
  };

  MARLIN_DEVICE RowSampler(const SampleArguments& args, int row, Shared& shared)
      : args_(args),
        row_(row),
        shared_(shared),
        first_(InBlock<kCluster>(shared, 0)),
        rank_(static_cast<int>(blockIdx.x) % kCluster),
        thread_(rank_ * kThreads + static_cast<int>(threadIdx.x)),
        state_row_(args.StateRowOf(row)),
        state_(reinterpret_cast<SamplerState*>(args.states + state_row_ * args.state_stride)),
        logits_(LogitsOf(args, row, state_)) {}

  /// The token of a row that has a state, or a mark, the same for all threads.
  MARLIN_DEVICE int Run() {
    // Until a token is drawn there is none.
    if (thread_ == 0) args_.tokens[row_ * args_.tokens_stride] = kNoToken;
    if (state_row_ >= args_.states_count) {
      return Refuse(ValueError::kStateRow, state_row_, row_, args_.states_count);
    }
    if (logits_.mask >= args_.masks) return Mark(kMaskRowMark);
    if (state_->magic != SamplerState::kMagic || state_->vocab != args_.vocab) {
      return Refuse(ValueError::kSamplerState, state_row_, args_.vocab, 0);
    }
    const SamplingView& options = state_->options;
    logits_.penalizes = options.repetition_penalty != 1.0f || options.presence_penalty != 0.0f ||
                        options.frequency_penalty != 0.0f;
    const Best best = FindBest();
    if (best.bad != INT_MAX) {
      const int infinite = isinf(logits_.At(best.bad)) ? 1 : 0;
      return Mark(kLogitMark - 2 * best.bad - infinite);
    }
    best_ = LogitOfToken(best.key);
    if (best_ == -INFINITY) return Mark(logits_.allowed == nullptr ? kNoLogitMark : kMaskMark);
    int drawn = IdOfToken(best.key);
    // Every function ends with the cluster in step: no thread reads counts any more.
    if (options.temperature != 0.0f) drawn = DrawLikely();
    if (thread_ == 0) {
      state_->seen()[drawn] += 2;
      args_.tokens[row_ * args_.tokens_stride] = drawn;
    }
    return drawn;
  }

 private:
  /// Marks the row as one that cannot be sampled. Messages name its state, unless there is one.
  MARLIN_DEVICE int Mark(int mark) {
    if (thread_ == 0) {
      const int named = args_.states_count > 1 ? state_row_ : -1;
      args_.tokens[row_ * args_.tokens_stride] = mark;
      if (!args_.marks) RecordError(args_.errors, ValueError::kMark, mark, named);
    }
    return mark;
  }

  /// Records a wrong argument.
  MARLIN_DEVICE int Refuse(ValueError error, int64_t a, int64_t b, int64_t c) {
    if (thread_ == 0) RecordError(args_.errors, error, a, b, c);
    return kNoToken;
  }

  MARLIN_DEVICE const Shared& SharedOf(int rank) const { return InBlock<kCluster>(shared_, rank); }

  /// Calls run(logit, id) for the tokens of this thread, ids ascending, whose loads are in flight
  /// together.
  template <int kAtOnce, typename Run>
  MARLIN_DEVICE void ForLogits(const Run& run) const {
    for (int first = thread_; first < args_.vocab; first += kAtOnce * kAllThreads) {
      float logits[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int id = first + i * kAllThreads;
        logits[i] = id < args_.vocab ? logits_.logits[id] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int id = first + i * kAllThreads;
        if (id < args_.vocab) run(logits_.Adjusted(logits[i], id), id);
      }
    }
  }

  static MARLIN_DEVICE Best Better(const Best& a, const Best& b) {
    return {max(a.key, b.key), min(a.bad, b.bad)};
  }

  MARLIN_DEVICE Best FindBest() {
    float largest = -INFINITY;
    int first = INT_MAX;  // The lowest id with that logit: a thread's ids ascend.
    Best best = {0, INT_MAX};
    ForLogits<8>([&](float logit, int id) {
      // NaN or +Inf; -Inf masks a token.
      if (!(logit < INFINITY)) best.bad = min(best.bad, id);
      if (logit > largest) {
        largest = logit;
        first = id;
      }
    });
    best.key = TokenKey(largest, first);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      best = Better(best,
                    {__shfl_xor_sync(~0u, best.key, step), __shfl_xor_sync(~0u, best.bad, step)});
    }
    if (threadIdx.x % 32 == 0) {
      shared_.warp_keys[threadIdx.x / 32] = best.key;
      shared_.warp_bad[threadIdx.x / 32] = best.bad;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 0; warp < kWarps; ++warp) {
        best = Better(best, {shared_.warp_keys[warp], shared_.warp_bad[warp]});
      }
      shared_.best = best;
    }
    SyncRow<kCluster>();
    best = shared_.best;
    for (int rank = 0; rank < kCluster; ++rank) best = Better(best, SharedOf(rank).best);
    SyncRow<kCluster>();
    return best;
  }

  /// The probability relative to the best token's.
  MARLIN_DEVICE double Likelihood(uint32_t key) const {
    const double difference = static_cast<double>(LogitOf(key)) - static_cast<double>(best_);
    return exp(difference / static_cast<double>(state_->options.temperature));
  }

  MARLIN_DEVICE int WeightBits() const { return 62 - (32 - __clz(args_.vocab)); }

  /// Whether a token's weight is surely zero: found without doubles, which most devices without
  /// Hopper's code compute slowly.
  MARLIN_DEVICE bool IsNegligible(uint32_t key) const {
    if constexpr (kHasWgmma) {
      return false;
    } else {
      constexpr float kLogOf2 = 0.6931472f;
      constexpr float kMargin = 1.0f;  // More than what is rounded.
      const float least = static_cast<float>(WeightBits()) * kLogOf2 + kMargin;
      return LogitOf(key) - best_ < -state_->options.temperature * least;
    }
  }

  /// The probability as an integer: the sum over a vocabulary does not overflow.
  MARLIN_DEVICE unsigned long long WeightOf(uint32_t key) const {
    if (IsNegligible(key)) return 0;
    return static_cast<unsigned long long>(ldexp(Likelihood(key), WeightBits()));
  }

  MARLIN_DEVICE int DrawLikely() {
    const SamplingView& options = state_->options;
    const auto one = [](uint32_t /*key*/) { return 1ULL; };
    const auto weight = [this](uint32_t key) { return WeightOf(key); };
    if (options.top_k > 0 && options.top_k < args_.vocab) {
      cut_ = Find(static_cast<unsigned long long>(options.top_k) - 1, one);
    }
    if (options.top_p != 1.0f) {
      const double wanted =
          ceil(static_cast<double>(options.top_p) * static_cast<double>(SumOf(weight)));
      cut_ = Find(static_cast<unsigned long long>(fmax(wanted, 1.0)) - 1, weight);
    }
    const auto likely = [this](uint32_t key) {
      if (IsNegligible(key)) return 0ULL;
      const bool keeps = Likelihood(key) >= static_cast<double>(state_->options.min_p);
      return keeps ? WeightOf(key) : 0ULL;
    };
    const unsigned long long total = SumOf(likely);
    if (thread_ == 0) {
      const double uniform = static_cast<double>(NextRandom(state_) >> 11) * 0x1p-53;
      first_.found = static_cast<unsigned long long>(uniform * static_cast<double>(total));
    }
    SyncRow<kCluster>();
    const unsigned long long target = min(first_.found, total - 1);
    SyncRow<kCluster>();
    return Find(target, likely).id;
  }

  /// Calls run(key, id) for the tokens of this thread that are kept.
  template <typename Run>
  MARLIN_DEVICE void ForKept(const Run& run) const {
    ForLogits<4>([&](float logit, int id) {
      const uint32_t key = KeyOf(logit);
      if (cut_.Keeps(key, id)) run(key, id);
    });
  }

  template <typename Weight>
  MARLIN_DEVICE unsigned long long SumOf(const Weight& weight_of) {
    unsigned long long sum = 0;
    ForKept([&](uint32_t key, int /*id*/) { sum += weight_of(key); });
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) shared_.warp_keys[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      sum = 0;
      for (int warp = 0; warp < kWarps; ++warp) sum += shared_.warp_keys[warp];
      shared_.sum = sum;
    }
    SyncRow<kCluster>();
    sum = 0;
    for (int rank = 0; rank < kCluster; ++rank) sum += SharedOf(rank).sum;
    SyncRow<kCluster>();
    return sum;
  }

  /// The first kept token, in the order of tokens, at which the cumulative weight exceeds `target`.
  /// Precondition: target is less than the sum.
  template <typename Weight>
  MARLIN_DEVICE Cut Find(unsigned long long target, const Weight& weight_of) {
    uint32_t prefix = 0;
    for (int level = 0; level < kLevels; ++level) {
      const int shift = max(32 - kDigitBits * (level + 1), 0);
      const int above = 32 - kDigitBits * level;  // Bits that are not decided yet.
      for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) shared_.bins[i] = 0;
      __syncthreads();
      ForKept([&](uint32_t key, int /*id*/) {
        if (above < 32 && key >> above != prefix) return;
        const unsigned long long weight = weight_of(key);
        const uint32_t digit = (key >> shift) & ((1u << (above - shift)) - 1u);
        if (weight != 0) atomicAdd(&shared_.bins[digit], weight);
      });
      SyncRow<kCluster>();
      for (int bin = thread_; bin < kBins; bin += kAllThreads) {
        unsigned long long total = 0;
        for (int rank = 0; rank < kCluster; ++rank) total += SharedOf(rank).bins[bin];
        first_.totals[bin] = total;
      }
      SyncRow<kCluster>();
      if (thread_ < 32) FindBin(target);
      SyncRow<kCluster>();
      prefix = prefix << (above - shift) | first_.digit;
      target = first_.found;
    }
    SyncRow<kCluster>();
    const unsigned long long each = weight_of(prefix);
    return {prefix, TieAt(prefix, static_cast<int>(target / max(each, 1ULL)))};
  }

  /// Finds the bin from the top at which the cumulative weight exceeds `target`, and what is left
  /// of the target in it. The first warp of rank 0.
  MARLIN_DEVICE void FindBin(unsigned long long target) {
    constexpr int kOfLane = kBins / 32;
    const int lane = static_cast<int>(threadIdx.x);
    const int top = kBins - 1 - lane * kOfLane;
    unsigned long long sum = 0;
    for (int i = 0; i < kOfLane; ++i) sum += shared_.totals[top - i];
    unsigned long long through = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned long long other = __shfl_up_sync(~0u, through, step);
      if (lane >= step) through += other;
    }
    unsigned long long before = through - sum;
    if (target < before || target >= through) return;
    for (int i = 0; i < kOfLane; ++i) {
      const unsigned long long bin = shared_.totals[top - i];
      if (target < before + bin) {
        shared_.digit = static_cast<uint32_t>(top - i);
        shared_.found = target - before;
        return;
      }
      before += bin;
    }
  }

  /// The id of kept token `number` of those with a key, by id. A thread counts adjacent ids.
  MARLIN_DEVICE int TieAt(uint32_t key, int number) {
    const int each = (args_.vocab + kAllThreads - 1) / kAllThreads;
    const int begin = min(thread_ * each, args_.vocab);
    const int end = min(begin + each, args_.vocab);
    int count = 0;
    for (int id = begin; id < end; ++id) count += Ties(key, id) ? 1 : 0;
    const int before = SumBefore(count, shared_.warp_sums);
    if (threadIdx.x == kThreads - 1) shared_.ties = before + count;
    SyncRow<kCluster>();
    int left = number - before;
    for (int rank = 0; rank < rank_; ++rank) left -= SharedOf(rank).ties;
    if (left >= 0 && left < count) {
      for (int id = begin; id < end; ++id) {
        if (Ties(key, id) && left-- == 0) first_.id = id;
      }
    }
    SyncRow<kCluster>();
    const int id = first_.id;
    SyncRow<kCluster>();
    return id;
  }
  MARLIN_DEVICE bool Ties(uint32_t key, int id) const {
    return KeyOf(logits_.At(id)) == key && cut_.Keeps(key, id);
  }

  const SampleArguments& args_;
  int row_;
  Shared& shared_;
  Shared& first_;  ///< That of rank 0.
  int rank_;
  int thread_;  ///< The number of this thread in the cluster.
  int state_row_;
  SamplerState* state_;
  RowLogits logits_;
  float best_ = 0.0f;
  Cut cut_;
};

/// Samples a row and, while the tokens are the drafts, the rows that follow it. Called by a
/// cluster.
template <int kCluster, int kThreads>
MARLIN_DEVICE void SampleRows(const SampleArguments& args) {
  using Sampler = RowSampler<kCluster, kThreads>;
  __shared__ typename Sampler::Shared shared;
  int row = static_cast<int>(blockIdx.x) / kCluster;
  if (args.StateRowOf(row) < 0 || args.DraftOf(row - 1) >= 0) return;
  while (true) {
    const int token = Sampler(args, row, shared).Run();
    const int draft = args.DraftOf(row);
    if (draft < 0) return;
    ++row;
    if (token != draft) break;
    SyncRow<kCluster>();  // The next row counts the token.
  }
  if (static_cast<int>(blockIdx.x) % kCluster != 0 || threadIdx.x != 0) return;
  for (bool more = true; more; ++row) {
    args.tokens[row * args.tokens_stride] = kSkippedMark;
    more = args.DraftOf(row) >= 0;
  }
}

/// A cluster for each row.
template <int kCluster, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    SampleKernel(const __grid_constant__ SampleArguments args) {
  EnterChain();
  // Code with clusters does not run the other kernel.
  if constexpr (kHasTma == (kCluster > 1)) SampleRows<kCluster, kThreads>(args);
}

template <int kCluster, int kThreads>
cudaError_t LaunchClusters(const SampleArguments& args, cudaStream_t stream) {
  SampleArguments copy = args;
  void* parameters[] = {&copy};
  LaunchSize size = {dim3(static_cast<unsigned>(args.rows * kCluster)), kThreads, 0, true};
  size.cluster = dim3(kCluster);
  return Launch(reinterpret_cast<const void*>(&SampleKernel<kCluster, kThreads>), size, parameters,
                stream);
}

/// One CTA.
__global__ void __launch_bounds__(kResetThreads)
    ResetKernel(const __grid_constant__ ResetArguments args) {
  EnterChain();
  SamplerState* const state = args.state;
  uint32_t* const seen = state->seen();
  for (int64_t id = threadIdx.x; id < args.vocab; id += kResetThreads) seen[id] = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < args.tokens; i += kResetThreads) {
    const int32_t id = args.prompt[i];
    if (id < 0 || id >= args.vocab) {
      RecordError(args.errors, ValueError::kPrompt, id, i, args.vocab);
    } else {
      seen[id] = 1;
    }
  }
  if (threadIdx.x != 0) return;
  state->magic = SamplerState::kMagic;
  state->vocab = args.vocab;
  state->options = args.options;
  state->next = SamplerState::kWords;
  uint64_t word = args.options.seed;
  state->random[0] = word;
  for (int i = 1; i < SamplerState::kWords; ++i) {
    word = 6364136223846793005ULL * (word ^ (word >> 62)) + static_cast<uint64_t>(i);
    state->random[i] = word;
  }
}

}  // namespace

int64_t SamplerStateBytes(int64_t vocab) {
  return RoundUp(int64_t{sizeof(SamplerState)} + vocab * int64_t{sizeof(uint32_t)},
                 kBufferAlignment);
}

Status Run(const ResetSamplerCall& call, const CallContext& context) {
  const SamplingOptions& options = call.options;
  const ResetArguments args = {
      {options.temperature, options.top_p, options.min_p, options.repetition_penalty,
       options.presence_penalty, options.frequency_penalty, options.top_k, options.seed},
      static_cast<SamplerState*>(call.state.data()),
      call.vocab,
      call.prompt.As<int32_t>(),
      call.prompt.dim(0),
      context.errors};
  return context.Launch("reset_sampler", &ResetKernel, dim3(1), kResetThreads, args);
}

Status Run(const SampleTokensCall& call, const CallContext& context) {
  const SampleArguments args = {call.logits.As<float>(),
                                call.logits.stride(0),
                                call.states.As<uint8_t>(),
                                call.states.stride(0),
                                call.state_rows.As<int32_t>(),
                                call.tokens.As<int32_t>(),
                                call.tokens.stride(0),
                                static_cast<int>(call.logits.dim(0)),
                                static_cast<int>(call.states.dim(0)),
                                static_cast<int>(call.logits.dim(1)),
                                call.marks,
                                call.allowed.As<uint32_t>(),
                                call.allowed_rows.As<int32_t>(),
                                call.allowed.empty() ? 0 : static_cast<int>(call.allowed.dim(0)),
                                call.allowed.empty() ? 0 : static_cast<int>(call.allowed.dim(1)),
                                call.drafts.As<int32_t>(),
                                context.errors};
  // As many CTAs as run at once: their registers leave room for one on an SM.
  constexpr int kFewRows = 16;
  const auto launch = !context.shape.has_tma() ? &LaunchClusters<1, 512>
                      : args.rows <= kFewRows  ? &LaunchClusters<8, 256>
                                               : &LaunchClusters<2, 512>;
  return context.Check(launch(args, context.stream), "sample");
}

}  // namespace marlin::cuda
