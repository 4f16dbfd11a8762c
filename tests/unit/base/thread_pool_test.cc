#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

namespace marlin::thread_pool_test {
namespace {

/// Runs `count` tasks and expects each exactly once, on valid worker indices, with one task at a
/// time per worker.
void ExpectEachTaskOnce(ThreadPool& pool, int64_t count) {
  std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
  std::vector<std::atomic<int>> active(static_cast<size_t>(pool.worker_count()));
  std::atomic<int> violations{0};
  pool.Run(count, [&](int64_t task, int worker) {
    if (task < 0 || task >= count || worker < 0 || worker >= pool.worker_count()) {
      ++violations;
      return;
    }
    if (active[static_cast<size_t>(worker)].fetch_add(1) != 0) ++violations;
    runs[static_cast<size_t>(task)].fetch_add(1);
    active[static_cast<size_t>(worker)].fetch_sub(1);
  });
  EXPECT_EQ(violations.load(), 0);
  for (int64_t i = 0; i < count; ++i) {
    ASSERT_EQ(runs[static_cast<size_t>(i)].load(), 1) << "task " << i << " of " << count;
  }
}

TEST(ThreadPool, RunsEachTaskOnceForAnyCounts) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.worker_count(), threads);
    for (const int64_t count : {0, 1, 2, 7, 8, 9, 1000}) ExpectEachTaskOnce(pool, count);
  }
}

TEST(ThreadPool, ZeroThreadsMeansThoseOfTheProcess) {
  ThreadPool pool(0);
  EXPECT_GE(ThreadPool::AvailableProcessors(), 1);
  EXPECT_EQ(pool.worker_count(), ThreadPool::AvailableProcessors());
  ExpectEachTaskOnce(pool, 100);
}

TEST(ThreadPool, ResultsAreVisibleAfterRun) {
  ThreadPool pool(4);
  std::vector<int64_t> squares(64);  // Not atomic: Run must order the writes before its return.
  for (int round = 0; round < 500; ++round) {
    pool.Run(64,
             [&](int64_t task, int) { squares[static_cast<size_t>(task)] = task * task + round; });
    for (int64_t i = 0; i < 64; ++i) {
      ASSERT_EQ(squares[static_cast<size_t>(i)], i * i + round) << "round " << round;
    }
  }
}

TEST(ThreadPool, WakesParkedWorkers) {
  ThreadPool pool(3);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));  // Longer than workers spin.
    ExpectEachTaskOnce(pool, 30);
  }
}

TEST(ThreadPool, NestedRunsCompleteInline) {
  ThreadPool pool(3);
  std::atomic<int> inner{0};
  pool.Run(6, [&](int64_t, int) {
    const std::thread::id outer_thread = std::this_thread::get_id();
    pool.Run(10, [&](int64_t, int) {
      EXPECT_EQ(std::this_thread::get_id(), outer_thread);
      ++inner;
    });
  });
  EXPECT_EQ(inner.load(), 60);
}

TEST(ThreadPool, ConcurrentCallersShareOnePool) {
  ThreadPool pool(2);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&pool] {
      for (int round = 0; round < 50; ++round) {
        std::atomic<int64_t> sum{0};
        pool.Run(20, [&](int64_t task, int) { sum += task; });
        EXPECT_EQ(sum.load(), 190);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(ThreadPool, UsesTheCallersParallelFor) {
  std::atomic<int> calls{0};
  ThreadPool pool(
      [&calls](int64_t count, const std::function<void(int64_t)>& body) {
        ++calls;
        std::vector<std::thread> threads;
        for (int64_t i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
        for (std::thread& thread : threads) thread.join();
      },
      3);
  EXPECT_EQ(pool.worker_count(), 3);
  ExpectEachTaskOnce(pool, 100);
  EXPECT_EQ(calls.load(), 1);
  ExpectEachTaskOnce(pool, 0);
  EXPECT_EQ(calls.load(), 1);
}

TEST(ThreadPool, ParallelForMayRunInOrderOnOneThread) {
  ThreadPool pool(
      [](int64_t count, const std::function<void(int64_t)>& body) {
        for (int64_t i = 0; i < count; ++i) body(i);
      },
      4);
  ExpectEachTaskOnce(pool, 17);
}

TEST(ThreadPool, ThrowsOnWhatATaskThrows) {
  ThreadPool pool(3);
  for (int round = 0; round < 20; ++round) {
    constexpr int kTasks = 1000;
    std::atomic<int> begun{0};
    try {
      pool.Run(kTasks, [&](int64_t task, int) {
        ++begun;
        if (task == round % 4) throw std::bad_alloc();
        // The other workers would need 0.3 s for all tasks; the exception is noticed much sooner.
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      });
      FAIL() << "nothing thrown";
    } catch (const std::bad_alloc&) {
    }
    EXPECT_LT(begun.load(), kTasks);
    ExpectEachTaskOnce(pool, 50);  // The pool is usable again, without the error.
  }
}

TEST(ThreadPool, ThrowsOnFromTheCallersThreads) {
  ThreadPool pool(
      [](int64_t count, const std::function<void(int64_t)>& body) {
        std::vector<std::thread> threads;
        for (int64_t i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
        for (std::thread& thread : threads) thread.join();
      },
      3);
  EXPECT_THROW(pool.Run(20, [](int64_t, int) { throw std::runtime_error("task"); }),
               std::runtime_error);
  ExpectEachTaskOnce(pool, 20);
}

TEST(ThreadPool, EveryWorkerSeesTheJobAndTheCallerItsResults) {
  // Each task waits for the others to start, so that all workers participate even if they are late;
  // only the pool orders the non-atomic memory (checked by ThreadSanitizer).
  constexpr int kWorkers = 3;
  ThreadPool pool(kWorkers);
  for (int64_t round = 0; round < 20; ++round) {
    const std::vector<int64_t> input(kWorkers, round);
    std::vector<int64_t> results(kWorkers);
    std::atomic<int> begun{0};
    pool.Run(kWorkers, [&](int64_t task, int worker) {
      begun.fetch_add(1, std::memory_order_relaxed);
      while (begun.load(std::memory_order_relaxed) < kWorkers) std::this_thread::yield();
      results[static_cast<size_t>(worker)] = input[static_cast<size_t>(task)] + worker;
    });
    for (int worker = 0; worker < kWorkers; ++worker) {
      ASSERT_EQ(results[static_cast<size_t>(worker)], round + worker);
    }
  }
}

TEST(ThreadPool, CallersComeAndGoWhileWorkersPark) {
  // Short jobs from several threads, with pauses in which workers fall asleep: late workers of one
  // job enter the next.
  ThreadPool pool(4);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&pool, caller] {
      std::vector<int64_t> results(16);  // Not atomic: written by workers, read after Run.
      for (int round = 0; round < 100; ++round) {
        if (round % 16 == caller) std::this_thread::sleep_for(std::chrono::microseconds(300));
        pool.Run(16, [&](int64_t task, int) { results[static_cast<size_t>(task)] = task + round; });
        for (int64_t i = 0; i < 16; ++i) {
          ASSERT_EQ(results[static_cast<size_t>(i)], i + round) << "caller " << caller;
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace marlin::thread_pool_test
