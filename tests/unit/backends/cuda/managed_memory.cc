// Lets a program that tests operations whose operands are vectors test those of a GPU. With
// MARLIN_TEST_DEVICE=cuda, `new` returns managed memory, which host and device read, every launch
// waits for its end, and without a GPU all tests are skipped.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>

#include "../../test_device.h"

namespace {

/// Blocks of powers of two, cut from large allocations: managed memory comes in pages.
class Pool {
 public:
  void* Take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    const int width = static_cast<int>(std::bit_width(std::max<size_t>(bytes, 1) - 1));
    const int order = std::max(width, kLeastOrder);
    if (void* const block = free_[order]; block != nullptr) {
      free_[order] = *static_cast<void**>(block);
      return block;
    }
    const size_t size = size_t{1} << order;
    if (left_ < size + kHeader && !Grow(size + kHeader)) return nullptr;
    auto* const header = next_;
    next_ += size + kHeader;
    left_ -= size + kHeader;
    *reinterpret_cast<int64_t*>(header) = order;
    return header + kHeader;
  }
  void Return(void* block) {
    if (block == nullptr) return;
    const std::lock_guard lock(mutex_);
    const int64_t order = *reinterpret_cast<int64_t*>(static_cast<uint8_t*>(block) - kHeader);
    *static_cast<void**>(block) = free_[order];
    free_[order] = block;
  }

 private:
  static constexpr int kLeastOrder = 6;
  static constexpr size_t kHeader = 64;  ///< Keeps blocks aligned to 64 bytes.
  static constexpr size_t kRegion = size_t{1} << 28;

  bool Grow(size_t bytes) {
    const size_t size = std::max(kRegion, bytes);
    void* region = nullptr;
    if (first_) setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
    first_ = false;
    if (cudaMallocManaged(&region, size) != cudaSuccess) {
      cudaGetLastError();
      region = std::aligned_alloc(kHeader, (size + kHeader - 1) / kHeader * kHeader);
    }
    next_ = static_cast<uint8_t*>(region);
    left_ = region == nullptr ? 0 : size;
    return region != nullptr;
  }

  std::mutex mutex_;
  void* free_[64] = {};
  uint8_t* next_ = nullptr;
  size_t left_ = 0;
  bool first_ = true;
};

/// Never destroyed: other objects free memory after it would be.
Pool& ThePool() {
  alignas(Pool) static uint8_t memory[sizeof(Pool)];
  static Pool* const pool = new (memory) Pool;
  return *pool;
}

/// The same during the whole process: blocks return to where they are from.
bool IsManaged() {
  static const bool managed = marlin::OnOtherDevice();
  return managed;
}

void* Allocate(size_t bytes) {
  void* const block = IsManaged() ? ThePool().Take(bytes) : std::malloc(std::max<size_t>(bytes, 1));
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

void Free(void* block) {
  if (IsManaged()) {
    ThePool().Return(block);
  } else {
    std::free(block);
  }
}

class SkipWithoutDevice : public ::testing::Environment {
 public:
  void SetUp() override {
    int count = 0;
    if (IsManaged() && (cudaGetDeviceCount(&count) != cudaSuccess || count == 0)) {
      GTEST_SKIP() << "no CUDA device";
    }
  }
};
::testing::Environment* const skip_without_device =
    ::testing::AddGlobalTestEnvironment(new SkipWithoutDevice);

}  // namespace

void* operator new(size_t bytes) { return Allocate(bytes); }
void* operator new[](size_t bytes) { return Allocate(bytes); }
void operator delete(void* block) noexcept { Free(block); }
void operator delete[](void* block) noexcept { Free(block); }
void operator delete(void* block, size_t /*bytes*/) noexcept { Free(block); }
void operator delete[](void* block, size_t /*bytes*/) noexcept { Free(block); }
