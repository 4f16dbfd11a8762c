// The selection of experts by several rows in the persistent kernel, and the tasks that follow from
// it: every selected expert is multiplied once, with the rows as columns.
#pragma once

#include "backends/cuda/persistent/persistent_deal_layout.h"
#include "backends/cuda/persistent/persistent_router.cuh"
#include "backends/cuda/persistent/persistent_rows_part.cuh"

namespace marlin::cuda {

/// The top-k selection of a row by logits alone, as LogitRouter, by one warp. A lane has every 32nd
/// expert: the first `kHeld` in registers, and more than those in shared memory.
class RowSelection {
 public:
  /// `keys`: KeyOf the logits, in shared memory; of no more than 1024 experts.
  MARLIN_DEVICE RowSelection(const PersistentRouter& options, const int* keys)
      : options_(options), keys_(keys) {
    int held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      held[i] = 32 * i + Lane() < options.experts ? keys[32 * i + Lane()] : kLeast;
    }
    uint32_t taken = 0;  // A bit for every expert of the lane that was selected.
#pragma unroll 1
    for (int place = 0; place < options.top_k; ++place) {
      int best = kLeast;
      int its = 0;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        its = held[i] > best ? i : its;
        best = max(best, held[i]);
      }
#pragma unroll 1
      for (int i = kHeld; 32 * i + Lane() < options.experts; ++i) {
        const int key = (taken >> i & 1) != 0 ? kLeast : keys[32 * i + Lane()];
        its = key > best ? i : its;
        best = max(best, key);
      }
      const int most = __reduce_max_sync(~0u, best);
      // Ties go to the lower expert.
      const int mine = best == most ? 32 * its + Lane() : kNone;
      const int expert = __reduce_min_sync(~0u, mine);
      if (mine == expert) taken |= 1u << its;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) held[i] = (taken >> i & 1) != 0 ? kLeast : held[i];
      largest_ = place == 0 ? most : largest_;
      id_ = Lane() == place ? expert : id_;
      key_ = Lane() == place ? most : key_;
    }
  }

  /// Stores the experts and their weights, which are of sigmoids. `keys`: KeyOf the logits.
  MARLIN_DEVICE void StoreSigmoids(const int* keys, int32_t* ids, float* weights) const {
    const bool selects = Lane() < options_.top_k;
    const float weight = WeightOfSigmoid(options_, OfKey(keys[selects ? id_ : 0]));
    if (!selects) return;
    ids[Lane()] = id_;
    weights[Lane()] = weight;
  }
  /// Stores the experts and their weights: see LogitRouter::Weigh.
  MARLIN_DEVICE void Store(int32_t* ids, float* weights) const {
    const auto weight = [&](int key) { return Exp2((OfKey(key) - OfKey(largest_)) * kLog2E); };
    const bool of_chosen = options_.normalize || options_.scoring == kSoftmaxOfChosen;
    const float mine = Lane() < options_.top_k ? weight(key_) : 0.0f;
    float sum = of_chosen ? mine : 0.0f;
    if (!of_chosen) {
#pragma unroll 1
      for (int e = Lane(); e < options_.experts; e += 32) sum += weight(keys_[e]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const float scale = __fdividef(static_cast<float>(options_.scaling_factor), sum);
    if (Lane() >= options_.top_k) return;
    ids[Lane()] = id_;
    weights[Lane()] = mine * scale;
  }

 private:
  static constexpr int kHeld = 4;
  static constexpr int kLeast = -0x7fffffff - 1;
  static constexpr int kNone = 0x7fffffff;

  static MARLIN_DEVICE int Lane() { return static_cast<int>(threadIdx.x) & 31; }

  const PersistentRouter& options_;
  const int* keys_;
  int id_ = 0;  ///< The lane's place in the selection.
  int key_ = 0;
  int largest_ = 0;
};

/// As RouteAnyhow, a row by a warp. `logits`: the rows' keys, `stride` apart. Ends with a barrier.
static __device__ __noinline__ void RouteRowsAnyhow(const PersistentArguments& args,
                                                    const PersistentLayer& layer, int* keys,
                                                    int stride, int32_t* ids, float* weights) {
  auto* const logits = reinterpret_cast<float*>(keys);
  const auto thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < args.rows * stride; i += kPersistentThreads) logits[i] = OfKey(keys[i]);
  SyncFirst<kPersistentThreads>();
  const int row = thread / 32;
  const RouterArguments router =
      RouterOf(args, layer, logits + row * stride, ids + row * kMostChosenExperts,
               weights + row * kMostChosenExperts);
  CheckBias(router, kPersistentThreads);
  if (row < args.rows) {
    auto* const scores = reinterpret_cast<double*>(Memory() + args.shared.sums);
    TokenRouter<1>(router, row, router.logits, scores + row * 2 * args.router.experts, nullptr)
        .Route();
  }
  SyncFirst<kPersistentThreads>();
}

/// The selections of a layer's experts by all rows. `kGeneral`: with shared experts.
template <bool kGeneral, bool kSigmoids>
class RowsChoice {
 public:
  /// `logits`: the words of all rows.
  MARLIN_DEVICE RowsChoice(const PersistentArguments& args, const PersistentLayer& layer,
                           uint32_t* logits, uint32_t tag)
      : args_(args),
        layer_(layer),
        logits_(logits),
        tag_(tag),
        thread_(static_cast<int>(threadIdx.x)) {}

  /// As ExpertChoice.
  MARLIN_DEVICE void PublishLogits() const {
    const int router_row = thread_ / kMostPersistentRows;
    const int row = thread_ % kMostPersistentRows;
    if (router_row >= Tables{args_}.Scratch().router_rows || row >= args_.rows) return;
    const int expert = static_cast<int>(blockIdx.x) + router_row * static_cast<int>(gridDim.x);
    const bool has_bias =
        layer_.router_bias != nullptr && (!kGeneral || expert < args_.router.experts);
    float logit = has_bias ? layer_.router_bias[expert] : 0.0f;
    if (layer_.router != nullptr) {
      float dot = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kPersistentWarps; ++warp) {
        dot += FixedRows().dots[router_row][row][warp];
      }
      logit = __fmaf_rn(dot, FixedRows().factors[row], logit);
    }
    PublishWord(logits_ + row * LogitWords() + expert, logit, tag_);
  }

  /// Gathers the logits, and selects every row's experts and their weights. Called by all threads;
  /// ends with a barrier.
  MARLIN_DEVICE void Route() const {
    const bool by_sigmoids = kSigmoids && SelectsBySigmoids(args_.router);
    bool is_plain = by_sigmoids || (args_.router.groups == 1 && layer_.choice_bias == nullptr &&
                                    args_.router.scoring != kSigmoid);
    is_plain = GatherLogits(by_sigmoids) && is_plain;
    RowsScratch& rows = FixedRows();
    float* const weights = Tables{args_}.Scratch().weights;
    if (SyncFirstAny<kPersistentThreads>(!is_plain)) {
      if constexpr (kGeneral) {
        RouteRowsAnyhow(args_, layer_, KeysOf(0), Stride(), rows.chosen, weights);
      } else {
#pragma unroll 1
        for (int row = 0; row < args_.rows; ++row) {
          RouteAnyhow(args_, layer_, KeysOf(row), rows.chosen + row * kMostChosenExperts,
                      weights + row * kMostChosenExperts, row);
        }
      }
      return;
    }
    const int row = thread_ / 32;
    if (row < args_.rows) {
      const RowSelection selection(args_.router, by_sigmoids ? ChoicesOf(row) : KeysOf(row));
      int32_t* const its_ids = rows.chosen + row * kMostChosenExperts;
      float* const its_weights = weights + row * kMostChosenExperts;
      if (by_sigmoids) {
        selection.StoreSigmoids(KeysOf(row), its_ids, its_weights);
      } else {
        selection.Store(its_ids, its_weights);
      }
    }
    SyncFirst<kPersistentThreads>();
  }

  /// Finds the tasks: the experts that any row has selected, in their order. Called by all threads,
  /// after a barrier after Route. Places may be read after another one.
  MARLIN_DEVICE void FindTasks() const {
    RowsScratch& rows = FixedRows();
    const int row = thread_ / kMostChosenExperts;
    const int place = thread_ % kMostChosenExperts;
    const bool selects = row < args_.rows && place < args_.router.top_k;
    const int expert = selects ? rows.chosen[thread_] : 0;
    if (selects) atomicOr(Masks() + expert, 1u << row);
    SyncFirst<kPersistentThreads>();
    if (thread_ < 32) NumberTasks();
    SyncFirst<kPersistentThreads>();
    if (selects) rows.places[Masks()[expert] >> kTaskAt][row] = static_cast<uint8_t>(place);
    if (kGeneral && row < args_.rows) {
      const int part = place - args_.router.top_k;
      if (part < 0 || part >= args_.router.shared) return;
      rows.places[rows.tasks - args_.router.shared + part][row] = static_cast<uint8_t>(place);
    }
  }

 private:
  /// In a word of the masks: the rows that have selected the expert, then its task.
  static constexpr int kTaskAt = 8;
  static_assert(kMostPersistentRows <= kTaskAt);

  /// A row's, with the shared expert's gate.
  MARLIN_DEVICE int LogitWords() const {
    return kGeneral ? args_.router.rows() : args_.router.experts;
  }
  MARLIN_DEVICE int Stride() const { return (args_.router.experts + 3) / 4 * 4; }
  MARLIN_DEVICE int* KeysOf(int row) const {
    return reinterpret_cast<int*>(Memory() + args_.shared.logits) + row * Stride();
  }
  /// The same of ChoiceOf: in the memory of sums.
  MARLIN_DEVICE int* ChoicesOf(int row) const {
    return reinterpret_cast<int*>(SumsOf(args_)) + row * Stride();
  }
  MARLIN_DEVICE uint32_t* Masks() const { return reinterpret_cast<uint32_t*>(KeysOf(args_.rows)); }

  /// Returns whether all that the thread has gathered are finite.
  MARLIN_DEVICE bool GatherLogits(bool by_sigmoids) const {
    constexpr int kAtOnce = 4;
    const int experts = args_.router.experts;
    const int words_of_row = LogitWords();
    const int count = args_.rows * words_of_row;
    bool finite = true;
#pragma unroll 1
    for (int first = thread_; first < count; first += kAtOnce * kPersistentThreads) {
      uint32_t words[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * kPersistentThreads;
        if (at < count) words[i] = PollWord(logits_ + at);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * kPersistentThreads;
        if (at >= count) break;
        const float logit = AwaitWord(logits_ + at, words[i], tag_);
        const int row = QuotientOf(at, words_of_row);
        const int expert = at - row * words_of_row;
        if (kGeneral && expert == experts) {
          WeighShared(row, TimesSigmoid(1.0f, logit));
          continue;
        }
        finite = finite && isfinite(logit);
        KeysOf(row)[expert] = KeyOf(logit);
        if (!by_sigmoids) continue;
        const bool has_bias = layer_.choice_bias != nullptr;
        const float choice =
            ChoiceOf(logit, has_bias, has_bias ? layer_.choice_bias[expert] : 0.0f);
        finite = finite && isfinite(choice);
        ChoicesOf(row)[expert] = KeyOf(choice);
      }
    }
    for (int e = thread_; e < experts; e += kPersistentThreads) Masks()[e] = 0;
    return finite;
  }

  MARLIN_DEVICE void WeighShared(int row, float weight) const {
    float* const weights =
        Tables{args_}.Scratch().weights + row * kMostChosenExperts + args_.router.top_k;
#pragma unroll 1
    for (int part = 0; part < args_.router.shared; ++part) weights[part] = weight;
  }

  /// The parts of the shared expert come last: all rows select them.
  MARLIN_DEVICE void NumberTasks() const {
    RowsScratch& rows = FixedRows();
    int32_t* const ids = Tables{args_}.Scratch().ids;
    int count = 0;
#pragma unroll 1
    for (int first = 0; first < args_.router.experts; first += 32) {
      const int expert = first + thread_;
      const uint32_t mask = expert < args_.router.experts ? Masks()[expert] : 0;
      const uint32_t selected = __ballot_sync(~0u, mask != 0);
      const int task = count + __popc(selected & ((1u << thread_) - 1));
      if (mask != 0) {
        ids[task] = expert;
        rows.task_rows[task] = static_cast<uint8_t>(mask);
        Masks()[expert] = mask | static_cast<uint32_t>(task) << kTaskAt;
      }
      count += __popc(selected);
    }
    if (kGeneral && thread_ < args_.router.shared) {
      ids[count + thread_] = args_.router.experts + thread_;
      rows.task_rows[count + thread_] = static_cast<uint8_t>((1 << args_.rows) - 1);
    }
    if (kGeneral) count += args_.router.shared;
    if (thread_ == 0) rows.tasks = count;
  }

  const PersistentArguments& args_;
  const PersistentLayer& layer_;
  uint32_t* logits_;
  uint32_t tag_;
  int thread_;
};

/// Where a phase of experts has the CTA's part.
MARLIN_DEVICE Schedule* ExpertSchedule(const PersistentArguments& args, const PhaseGemm& gemm) {
  return reinterpret_cast<Schedule*>(Memory() + args.shared.schedules + gemm.schedule);
}

}  // namespace marlin::cuda
