#include "base/thread_pool.h"

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <chrono>
#include <system_error>
#include <utility>

namespace marlin {
namespace {

// Waking a parked worker costs 69 us on the machine of docs/decisions/0003, a spinning one 0.3 us;
// consecutive layers of a model follow each other within this time.
constexpr auto kSpinTime = std::chrono::microseconds(100);

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Spins until value differs from old, then blocks. Yields periodically, so that another process on
/// the same core is not starved.
void AwaitChange(const std::atomic<uint32_t>& value, uint32_t old) {
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  while (std::chrono::steady_clock::now() < deadline) {
    for (int i = 0; i < 64; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      Pause();
    }
    std::this_thread::yield();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadStartError::ThreadStartError(int started, int wanted, const std::string& reason)
    : message_("threads: " + std::to_string(started) + " of " + std::to_string(wanted) +
               " can run: " + reason) {}

int ThreadPool::AvailableProcessors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : static_cast<int>(count);
}

ThreadPool::ThreadPool(int threads) : worker_count_(threads > 0 ? threads : AvailableProcessors()) {
  threads_.reserve(static_cast<size_t>(worker_count_ - 1));
  try {
    for (int worker = 1; worker < worker_count_; ++worker) {
      threads_.emplace_back([this, worker] { WorkerLoop(worker); });
    }
  } catch (const std::system_error& error) {
    const int started = static_cast<int>(threads_.size());
    StopWorkers();
    throw ThreadStartError(started + 1, worker_count_, error.code().message());
  } catch (...) {
    StopWorkers();
    throw;
  }
}

ThreadPool::ThreadPool(ParallelFor parallel_for, int threads)
    : worker_count_(threads > 0 ? threads : AvailableProcessors()),
      parallel_for_(std::move(parallel_for)) {}

ThreadPool::~ThreadPool() { StopWorkers(); }

void ThreadPool::StopWorkers() {
  stop_.store(true, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::DrainTasks(const Task& task, int64_t count, int worker) noexcept {
  try {
    for (;;) {
      const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) return;
      task(i, worker);
    }
  } catch (...) {
    if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
    next_.store(count, std::memory_order_relaxed);
  }
}

void ThreadPool::WorkerLoop(int worker) {
  uint32_t seen = 0;
  for (;;) {
    AwaitChange(generation_, seen);
    seen = generation_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    // A worker that arrives after the caller has closed the job stays out: Run waits for workers
    // that have entered, never for one that the system has not scheduled yet. Reads of task_ and
    // count_ are ordered after their writes because job_ holds the caller's release store, or
    // additions to it, which continue its release sequence; a worker late for one job may therefore
    // enter the next.
    uint32_t job = job_.load(std::memory_order_acquire);
    while ((job & kOpen) != 0 &&
           !job_.compare_exchange_weak(job, job + 1, std::memory_order_acq_rel)) {
    }
    if ((job & kOpen) == 0) continue;
    DrainTasks(*task_, count_, worker);
    if (job_.fetch_sub(1, std::memory_order_acq_rel) == 1) job_.notify_one();
  }
}

void ThreadPool::Run(int64_t count, Task task) {
  if (count <= 0) return;
  const bool inline_run =
      count == 1 || worker_count_ == 1 || busy_.exchange(true, std::memory_order_acquire);
  if (inline_run) {
    for (int64_t i = 0; i < count; ++i) task(i, 0);
    return;
  }
  next_.store(0, std::memory_order_relaxed);
  if (parallel_for_) {
    parallel_for_(worker_count_,
                  [&](int64_t worker) { DrainTasks(task, count, static_cast<int>(worker)); });
  } else {
    task_ = &task;
    count_ = count;
    job_.store(kOpen, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    DrainTasks(task, count, 0);
    uint32_t inside = job_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    for (; inside != 0; inside = job_.load(std::memory_order_acquire)) AwaitChange(job_, inside);
  }
  std::exception_ptr error;
  if (failed_.load(std::memory_order_relaxed)) {
    error = std::exchange(error_, nullptr);
    failed_.store(false, std::memory_order_relaxed);
  }
  busy_.store(false, std::memory_order_release);
  if (error) std::rethrow_exception(error);
}

}  // namespace marlin
