// Several GEMMs in one run of the thread pool.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>
#include <variant>

#include "backends/cpu/gemm/gemm_job.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/thread_pool.h"

namespace marlin::cpu {

/// Jobs that share a run of the pool, and the tasks before each of them.
class JobList {
 public:
  /// `memory` has BytesFor(capacity).
  static int64_t BytesFor(int64_t capacity) {
    return RoundUp(capacity * static_cast<int64_t>(sizeof(GemmJob)), kBufferAlignment) +
           2 * RoundUp((capacity + 1) * static_cast<int64_t>(sizeof(int64_t)), kBufferAlignment);
  }
  JobList(std::byte* memory, int64_t capacity)
      : jobs_(reinterpret_cast<GemmJob*>(memory)),
        first_pack_(reinterpret_cast<int64_t*>(
            memory + RoundUp(capacity * static_cast<int64_t>(sizeof(GemmJob)), kBufferAlignment))),
        first_task_(first_pack_ + RoundUp((capacity + 1) * static_cast<int64_t>(sizeof(int64_t)),
                                          kBufferAlignment) /
                                      static_cast<int64_t>(sizeof(int64_t))) {
    first_pack_[0] = 0;
    first_task_[0] = 0;
  }

  void Add(const GemmJob& job) {
    static_assert(std::is_trivially_destructible_v<GemmJob>);
    const GemmJob& added = *new (jobs_ + count_) GemmJob(job);
    const auto [packs, tasks] = std::visit(
        [](const auto& each) { return std::pair(each.pack_tasks(), each.tasks()); }, added);
    first_pack_[count_ + 1] = first_pack_[count_] + packs;
    first_task_[count_ + 1] = first_task_[count_] + tasks;
    ++count_;
  }

  /// Packs and runs all jobs. Worker w has the scratch at scratch + w * scratch_bytes.
  void Run(ThreadPool& pool, std::byte* scratch, int64_t scratch_bytes) const {
    pool.Run(first_pack_[count_], [&](int64_t i, int) {
      const int64_t job = JobOf(first_pack_, i);
      std::visit([&](const auto& each) { each.Pack(i - first_pack_[job]); }, jobs_[job]);
    });
    pool.Run(first_task_[count_], [&](int64_t i, int worker) {
      const int64_t job = JobOf(first_task_, i);
      std::visit(
          [&](const auto& each) {
            each.Run(i - first_task_[job], scratch + worker * scratch_bytes);
          },
          jobs_[job]);
    });
  }

 private:
  /// The job that has number i of those that `first` counts.
  int64_t JobOf(const int64_t* first, int64_t i) const {
    return std::upper_bound(first, first + count_ + 1, i) - first - 1;
  }

  GemmJob* jobs_;
  int64_t* first_pack_;  ///< [count + 1]
  int64_t* first_task_;
  int64_t count_ = 0;
};

}  // namespace marlin::cpu
