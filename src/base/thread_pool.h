// A fork-join pool: workers spin for a moment, then park.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "base/function_ref.h"

namespace marlin {

/// Thrown when the system starts fewer threads than requested, because address space or the thread
/// limit ran out. It is an allocation failure, so every function that maps those to
/// Code::kOutOfMemory covers it; the message has both numbers.
class ThreadStartError : public std::bad_alloc {
 public:
  ThreadStartError(int started, int wanted, const std::string& reason);
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

/// Runs the tasks of one job at a time on its workers and the calling thread. An atomic counter
/// distributes tasks, so a preempted worker delays only its current task. Thread-safe: a call that
/// finds the pool busy (another thread's job, or a nested call) runs its tasks inline.
class ThreadPool {
 public:
  /// A task receives its index and the worker [0, worker_count()) that runs it; within one Run a
  /// worker runs one task at a time, so per-worker scratch needs no lock.
  using Task = FunctionRef<void(int64_t task, int worker)>;
  using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>& body)>;

  /// threads <= 0: one per available processor. The calling thread counts as one. Throws
  /// ThreadStartError after joining the threads that did start.
  explicit ThreadPool(int threads);
  /// Runs on the caller's own pool, up to `threads` at a time; starts no threads.
  ThreadPool(ParallelFor parallel_for, int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int worker_count() const { return worker_count_; }

  /// Runs task(i, worker) for every i in [0, count) and returns when all are done. When a task
  /// throws, no further tasks start, and the first exception is rethrown once the running ones are
  /// done.
  void Run(int64_t count, Task task);

  /// Processors available to this process.
  static int AvailableProcessors();

 private:
  void WorkerLoop(int worker);
  void StopWorkers();
  void DrainTasks(const Task& task, int64_t count, int worker) noexcept;

  int worker_count_ = 1;
  ParallelFor parallel_for_;
  std::vector<std::thread> threads_;

  /// Set in job_ while workers may still enter.
  static constexpr uint32_t kOpen = 1u << 31;

  // One job at a time. generation_ announces it; job_ publishes task_ and count_ and counts the
  // workers inside.
  alignas(64) std::atomic<bool> busy_{false};
  alignas(64) std::atomic<uint32_t> generation_{0};
  const Task* task_ = nullptr;
  int64_t count_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> job_{0};
  std::atomic<bool> stop_{false};
  // The first exception of a job, kept by the thread that set failed_.
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace marlin
