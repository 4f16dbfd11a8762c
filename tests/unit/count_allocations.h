// Counts the allocations of a test program: replaces operator new and delete of the whole program,
// so only its one source file may include this.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace marlin {

inline std::atomic<bool> counting_allocations{false};
inline std::atomic<int64_t> allocation_count{0};

inline void* CountedNew(size_t bytes) {
  if (counting_allocations.load(std::memory_order_relaxed)) allocation_count.fetch_add(1);
  if (void* const data = std::malloc(bytes == 0 ? 1 : bytes)) return data;
  throw std::bad_alloc();
}

/// Returns how often `body` calls operator new, on any thread.
template <class Body>
int64_t AllocationsOf(Body&& body) {
  allocation_count = 0;
  counting_allocations = true;
  body();
  counting_allocations = false;
  return allocation_count;
}

}  // namespace marlin

// Not inlined: g++ would see std::free of what operator new returned, and warn of a mismatch.
#define MARLIN_NOT_INLINED __attribute__((noinline))
MARLIN_NOT_INLINED void* operator new(size_t bytes) { return marlin::CountedNew(bytes); }
MARLIN_NOT_INLINED void* operator new[](size_t bytes) { return marlin::CountedNew(bytes); }
MARLIN_NOT_INLINED void operator delete(void* data) noexcept { std::free(data); }
MARLIN_NOT_INLINED void operator delete[](void* data) noexcept { std::free(data); }
MARLIN_NOT_INLINED void operator delete(void* data, size_t) noexcept { std::free(data); }
MARLIN_NOT_INLINED void operator delete[](void* data, size_t) noexcept { std::free(data); }
#undef MARLIN_NOT_INLINED
