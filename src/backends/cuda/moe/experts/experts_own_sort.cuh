// Few selections are sorted by expert in shared memory, by every CTA for itself: that takes less
// time than a launch. The result is the same as of the sort (experts_sort.cu).
//
//   ids        5 2 5 9 2          of two tokens, 2 and 3 selections
//   slot_of    2 0 3 4 1          smaller ids, then equal ones before it
//   experts    2 5 9              those that have rows, with their first slots: 0 2 4, end 5
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/moe/experts/experts_layout.h"

namespace marlin::cuda {

/// The experts that have rows, in the order of their slots.
struct ActiveExperts {
  int count = 0;
  const int* expert = nullptr;  ///< [count]; null: expert i is i.
  const int* begin = nullptr;   ///< [count + 1], the first slot of each.
  const int* token = nullptr;   ///< [slots]

  MARLIN_DEVICE int ExpertAt(int i) const { return expert == nullptr ? i : expert[i]; }
};

/// Records the first selection of no expert. Called by one thread.
MARLIN_DEVICE void RecordBadSelection(const ErrorView& errors, const int32_t* ids, int top_k,
                                      int experts, int selection) {
  ValueRecord& record = *errors.record;
  if (atomicCAS(&record.bad_selection, 0, 1) != 0) return;
  record.token = selection / top_k;
  record.selection = selection % top_k;
  record.id = ids[selection];
  record.experts = experts;
  *errors.any = 1;
}

/// Sorts the selections of `sort`, kThreadsOfSelection each. Called by all threads of a CTA, which
/// has at least as many; `memory`: OwnSortBytes of shared memory.
class OwnSort {
 public:
  MARLIN_DEVICE OwnSort(const OwnSortArguments& sort, const SlotsView& slots, int* memory)
      : sort_(sort),
        slots_(slots),
        selections_(sort.tokens * sort.top_k),
        thread_(static_cast<int>(threadIdx.x)),
        selection_(thread_ / kThreadsOfSelection),
        part_(thread_ % kThreadsOfSelection),
        keys_(memory),
        leaders_(keys_ + kMostOwnSelections),
        expert_(leaders_ + kMostOwnSelections),
        begin_(expert_ + kMostOwnSelections + 1),
        token_(begin_ + kMostOwnSelections + 2) {}

  MARLIN_DEVICE ActiveExperts Run() {
    const bool exists = selection_ < selections_;
    const int id = exists ? sort_.ids[selection_] : 0;
    const bool valid = id >= 0 && id < slots_.experts;
    const int key = exists && valid && IsPresent(id) ? id : kNone;
    const bool stores = part_ == 0 && selection_ < kMostOwnSelections;
    if (stores) keys_[selection_] = key;
    const bool any_bad = __syncthreads_or(exists && !valid ? 1 : 0) != 0;
    const bool publishes = sort_.publishes && blockIdx.x == 0;
    if (any_bad && publishes && thread_ == 0) ReportFirstBad();

    const Place place = PlaceOf(key);
    const bool leads = key != kNone && place.equal_before == 0;
    if (stores) leaders_[selection_] = leads ? key : kNone;
    const int slot = key == kNone ? -1 : place.smaller + place.equal_before;
    if (stores && slot >= 0) token_[slot] = selection_ / sort_.top_k;
    if (stores && exists && publishes) slots_.slot_of[selection_] = slot;
    const int routed = __syncthreads_count(stores && slot >= 0 ? 1 : 0);

    const int at = SmallerThan(leaders_, key);
    if (stores && leads) {
      expert_[at] = key;
      begin_[at] = place.smaller;
    }
    for (int t = thread_; sort_.shared && t < sort_.tokens; t += static_cast<int>(blockDim.x)) {
      token_[routed + t] = t;
    }
    int count = __syncthreads_count(stores && leads ? 1 : 0);
    if (thread_ == 0) AddEnd(count, routed, publishes);
    __syncthreads();
    count += sort_.shared ? 1 : 0;
    return {count, expert_, begin_, token_};
  }

 private:
  static constexpr int kNone = 0x7fffffff;  ///< Not on this device, or no expert at all.
  static_assert(kThreadsOfSelection * kMostOwnSelections <= kExpertThreads);

  struct Place {
    int smaller = 0;       ///< Selections of smaller ids.
    int equal_before = 0;  ///< Earlier selections of the same id.
  };

  MARLIN_DEVICE bool IsPresent(int id) const {
    return (sort_.present[id / 32] >> (id % 32) & 1) != 0;
  }

  /// The sum of a number over the threads of a selection.
  static MARLIN_DEVICE int SumOfParts(int number) {
#pragma unroll
    for (int step = 1; step < kThreadsOfSelection; step *= 2) {
      number += __shfl_xor_sync(~0u, number, step);
    }
    return number;
  }

  MARLIN_DEVICE Place PlaceOf(int key) const {
    Place place;
#pragma unroll 4
    for (int i = part_; i < selections_; i += kThreadsOfSelection) {
      const int other = keys_[i];
      place.smaller += other < key ? 1 : 0;
      place.equal_before += other == key && i < selection_ ? 1 : 0;
    }
    return {SumOfParts(place.smaller), SumOfParts(place.equal_before)};
  }

  MARLIN_DEVICE int SmallerThan(const int* keys, int key) const {
    int smaller = 0;
#pragma unroll 4
    for (int i = part_; i < selections_; i += kThreadsOfSelection) {
      smaller += keys[i] < key ? 1 : 0;
    }
    return SumOfParts(smaller);
  }

  /// Ends the list, with the shared expert if there is one.
  MARLIN_DEVICE void AddEnd(int count, int routed, bool publishes) const {
    begin_[count] = routed;
    if (sort_.shared) {
      expert_[count] = slots_.experts;
      begin_[count + 1] = routed + sort_.tokens;
    }
    if (publishes) slots_.begin[slots_.experts] = routed;
  }

  MARLIN_DEVICE void ReportFirstBad() const {
    for (int i = 0; i < selections_; ++i) {
      if (sort_.ids[i] >= 0 && sort_.ids[i] < slots_.experts) continue;
      RecordBadSelection(sort_.errors, sort_.ids, sort_.top_k, slots_.experts, i);
      return;
    }
  }

  const OwnSortArguments& sort_;
  const SlotsView& slots_;
  int selections_;
  int thread_;
  int selection_;  ///< The thread's.
  int part_;       ///< Which of the selection's threads.
  int* keys_;      ///< The expert of every selection, or kNone.
  int* leaders_;   ///< The expert of selections that are its first, or kNone.
  int* expert_;
  int* begin_;
  int* token_;
};

}  // namespace marlin::cuda
