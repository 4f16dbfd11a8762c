// The selection of experts in the persistent kernel: every CTA computes some logits, and selects by
// all of them, as the others do.
#pragma once

#include "backends/cuda/attention/exact/softmax_rows.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/common/thread_barrier.cuh"
#include "backends/cuda/moe/router/token_router.cuh"
#include "backends/cuda/persistent/persistent_exchange.cuh"
#include "backends/cuda/persistent/persistent_tiles.cuh"

namespace marlin::cuda {

/// Integers in the order of floats that are not NaN; the two zeros are one.
MARLIN_DEVICE int KeyOf(float value) {
  const int bits = __float_as_int(value + 0.0f);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
MARLIN_DEVICE float OfKey(int key) { return __int_as_float(key ^ (key >> 31 & 0x7fffffff)); }

/// The top-k selection by logits alone: a softmax keeps their order. Ties go to the lower expert.
struct LogitRouter {
  const PersistentRouter& options;
  const int* keys;  ///< Shared memory: KeyOf the logits, padded to quads with less than all.
  int32_t* ids;

  /// An expert's place is the number of experts before it; four threads count it. Called by all
  /// threads.
  MARLIN_DEVICE void Select() const {
    const auto* const quads = reinterpret_cast<const int4*>(keys);
    const int part = static_cast<int>(threadIdx.x) & 3;
#pragma unroll 1
    for (int first = 0; first < options.experts; first += kPersistentThreads / 4) {
      const int e = min(first + static_cast<int>(threadIdx.x >> 2), options.experts - 1);
      const int mine = keys[e];
      const int my_quad = e >> 2;
      int before = 0;
#pragma unroll 4
      for (int quad = part; 4 * quad < options.experts; quad += 4) {
        const int4 v = quads[quad];
        // Equal ones come before it if they are lower.
        const int least = mine - (quad < my_quad ? 1 : 0);
        before += (v.x > least ? 1 : 0) + (v.y > least ? 1 : 0) + (v.z > least ? 1 : 0) +
                  (v.w > least ? 1 : 0);
      }
      if (part == (my_quad & 3)) {
        const int4 v = quads[my_quad];
        const int place = e & 3;
        before += (place > 0 && v.x == mine ? 1 : 0) + (place > 1 && v.y == mine ? 1 : 0) +
                  (place > 2 && v.z == mine ? 1 : 0);
      }
      before += __shfl_xor_sync(~0u, before, 1);
      before += __shfl_xor_sync(~0u, before, 2);
      if (part == 0 && before < options.top_k) ids[before] = e;
    }
  }

  /// Softmax over all experts or over the selected ones, which is the same after normalization.
  /// Called by one warp.
  MARLIN_DEVICE void Weigh(float* weights) const {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const float largest = OfKey(keys[ids[0]]);
    const auto weight = [&](int expert) { return Exp2((OfKey(keys[expert]) - largest) * kLog2E); };
    const bool of_chosen = options.normalize || options.scoring == kSoftmaxOfChosen;
    const int count = of_chosen ? options.top_k : options.experts;
    float sum = 0.0f;
#pragma unroll 1
    for (int i = lane; i < count; i += 32) sum += weight(of_chosen ? ids[i] : i);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const float scale = __fdividef(static_cast<float>(options.scaling_factor), sum);
    if (lane < options.top_k) weights[lane] = weight(ids[lane]) * scale;
  }
};

/// The selection by fp32 sums of sigmoids and biases, as reference models have it. Only without
/// groups, and only in forms that have room for its code.
MARLIN_DEVICE bool SelectsBySigmoids(const PersistentRouter& options) {
  return options.scoring == kSigmoid && options.groups == 1;
}
/// An expert's place in the order of that selection.
MARLIN_DEVICE float ChoiceOf(float logit, bool has_bias, float bias) {
  return has_bias ? TimesSigmoid(1.0f, logit) + bias : logit;
}
/// The weights of the selected experts, of which each of a warp's first lanes has the logit.
MARLIN_DEVICE float WeightOfSigmoid(const PersistentRouter& options, float logit) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const float score = lane < options.top_k ? TimesSigmoid(1.0f, logit) : 0.0f;
  float sum = score;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  // All scores may underflow to 0, which must not become 0 / 0: see the CPU's router.
  sum = fmaxf(sum + 1e-20f, static_cast<float>(options.least_sum));
  const float scaled = score * static_cast<float>(options.scaling_factor);
  return options.normalize ? __fdividef(scaled, sum) : scaled;
}

/// The arguments of the router's own code for a row.
MARLIN_DEVICE RouterArguments RouterOf(const PersistentArguments& args,
                                       const PersistentLayer& layer, const float* logits,
                                       int32_t* ids, float* weights) {
  RouterArguments router;
  router.logits = logits;
  router.ids = ids;
  router.weights = weights;
  router.bias = layer.choice_bias;
  router.tokens = 1;
  router.experts = args.router.experts;
  router.top_k = args.router.top_k;
  router.scoring = args.router.scoring;
  router.groups = args.router.groups;
  router.top_groups = args.router.top_groups;
  router.best_of_group = args.router.best_of_group;
  router.normalize = args.router.normalize;
  router.least_sum = args.router.least_sum;
  router.scaling_factor = args.router.scaling_factor;
  router.errors = args.errors;
  return router;
}

/// The router of all other kinds, and of logits that are errors. Called by all threads, rarely: not
/// inlined, it does not push the rest out of the instruction cache.
static __device__ __noinline__ void RouteAnyhow(const PersistentArguments& args,
                                                const PersistentLayer& layer, int* keys,
                                                int32_t* ids, float* weights, int row = 0) {
  PersistentScratch& scratch = Tables{args}.Scratch();
  auto* const logits = reinterpret_cast<float*>(keys);
  for (int e = static_cast<int>(threadIdx.x); e < args.router.experts; e += kPersistentThreads) {
    logits[e] = OfKey(keys[e]);
  }
  SyncFirst<kPersistentThreads>();
  const RouterArguments router = RouterOf(args, layer, logits, ids, weights);
  CheckBias(router, kPersistentThreads);
  auto* const scores = reinterpret_cast<double*>(Memory() + args.shared.sums);
  TokenRouter<kPersistentWarps>(router, row, logits, scores, scratch.router).Route();
  SyncFirst<kPersistentThreads>();
}

/// The selection of a layer's experts. `logits`: the words of all of them.
template <bool kShared, bool kSigmoids>
class ExpertChoice {
 public:
  MARLIN_DEVICE ExpertChoice(const PersistentArguments& args, const PersistentLayer& layer,
                             uint32_t* logits, uint32_t tag)
      : args_(args),
        layer_(layer),
        logits_(logits),
        tag_(tag),
        thread_(static_cast<int>(threadIdx.x)) {}

  /// Publishes the logits of the CTA's rows of the router: in layers without one too, so that no
  /// tag is one of long ago.
  MARLIN_DEVICE void PublishLogits() const {
    if (thread_ >= Scratch().router_rows) return;
    const int expert = static_cast<int>(blockIdx.x) + thread_ * static_cast<int>(gridDim.x);
    const bool has_bias = layer_.router_bias != nullptr && expert < args_.router.experts;
    float logit = has_bias ? layer_.router_bias[expert] : 0.0f;
    if (layer_.router != nullptr) {
      float dot = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kPersistentWarps; ++warp) dot += Scratch().dots[thread_][warp];
      logit = __fmaf_rn(dot, NormFactor(Scratch(), args_.features, layer_.mlp_epsilon), logit);
    }
    PublishWord(logits_ + expert, logit, tag_);
  }

  /// Gathers the logits, and selects the experts and their weights, which the last warp writes:
  /// they may be read after one more barrier.
  MARLIN_DEVICE void Route() const {
    auto* const keys = reinterpret_cast<int*>(Memory() + args_.shared.logits);
    const int experts = args_.router.experts;
    const bool by_sigmoids = kSigmoids && SelectsBySigmoids(args_.router);
    int* const choices = by_sigmoids ? reinterpret_cast<int*>(SumsOf(args_)) : keys;
    bool is_plain = by_sigmoids || (args_.router.groups == 1 && layer_.choice_bias == nullptr &&
                                    args_.router.scoring != kSigmoid);
#pragma unroll 1
    for (int e = thread_; e < (experts + 3) / 4 * 4; e += kPersistentThreads) {
      const bool exists = e < experts;
      float bias = 0.0f;
      if (by_sigmoids && exists && layer_.choice_bias != nullptr) bias = layer_.choice_bias[e];
      float logit = NoScore();
      if (exists) {
        logit = AwaitWord(logits_ + e, PollWord(logits_ + e), tag_);
        is_plain = is_plain && isfinite(logit) && isfinite(bias);
      }
      keys[e] = KeyOf(logit);
      if (!by_sigmoids) continue;
      // Choices may be negative, and padding comes last.
      choices[e] = KeyOf(exists ? ChoiceOf(logit, layer_.choice_bias != nullptr, bias) : NoScore());
    }
    if constexpr (kShared) WeighShared();
    if (SyncFirstAny<kPersistentThreads>(!is_plain)) {
      RouteAnyhow(args_, layer_, keys, Scratch().ids, Scratch().weights);
    } else {
      const LogitRouter router{args_.router, choices, Scratch().ids};
      router.Select();
      SyncFirst<kPersistentThreads>();
      if (thread_ < kPersistentThreads - 32) return;
      if (by_sigmoids) {
        WeighSigmoids(keys);
      } else {
        router.Weigh(Scratch().weights);
      }
    }
  }

 private:
  MARLIN_DEVICE PersistentScratch& Scratch() const { return Tables{args_}.Scratch(); }

  /// Called by one warp.
  MARLIN_DEVICE void WeighSigmoids(const int* keys) const {
    const int lane = thread_ & 31;
    const int id = lane < args_.router.top_k ? Scratch().ids[lane] : 0;
    const float weight = WeightOfSigmoid(args_.router, OfKey(keys[id]));
    if (lane < args_.router.top_k) Scratch().weights[lane] = weight;
  }

  MARLIN_DEVICE void WeighShared() const {
    if (thread_ >= args_.router.shared) return;
    float weight = 1.0f;
    if (args_.router.shared_gated != 0) {
      const uint32_t* const score = logits_ + args_.router.experts;
      weight = TimesSigmoid(1.0f, AwaitWord(score, PollWord(score), tag_));
    }
    Scratch().weights[args_.router.top_k + thread_] = weight;
  }

  const PersistentArguments& args_;
  const PersistentLayer& layer_;
  uint32_t* logits_;
  uint32_t tag_;
  int thread_;
};

}  // namespace marlin::cuda
