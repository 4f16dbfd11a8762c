#include "base/aligned_buffer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace marlin::aligned_buffer_test {
namespace {

bool IsAligned(const std::byte* data, int64_t alignment) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(alignment) == 0;
}

TEST(AlignedBuffer, IsAlignedAndWritableToItsLastByte) {
  for (const int64_t bytes : {1, 63, 64, 65, 4097, (2 << 20) - 1, 2 << 20, (2 << 20) + 1}) {
    const auto buffer = AlignedBuffer::Allocate(bytes);
    ASSERT_TRUE(buffer.ok()) << bytes;
    EXPECT_EQ(buffer->size(), bytes);
    EXPECT_TRUE(IsAligned(buffer->data(), kBufferAlignment)) << bytes;
    EXPECT_EQ(bytes >= (2 << 20) && !IsAligned(buffer->data(), 2 << 20), false) << bytes;
    std::memset(buffer->data(), 0x5a, static_cast<size_t>(bytes));
    EXPECT_EQ(buffer->data()[bytes - 1], std::byte{0x5a});
  }
}

TEST(AlignedBuffer, TypedAccessCountsBytes) {
  const auto buffer = AlignedBuffer::Allocate(128);
  ASSERT_TRUE(buffer.ok());
  *buffer->As<uint32_t>(64) = 7;
  EXPECT_EQ(buffer->As<uint32_t>()[16], 7u);
}

TEST(AlignedBuffer, ZeroBytesIsAValidBuffer) {
  const auto buffer = AlignedBuffer::Allocate(0);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ(buffer->size(), 0);
}

TEST(AlignedBuffer, MovesOwnership) {
  auto buffer = AlignedBuffer::Allocate(64);
  ASSERT_TRUE(buffer.ok());
  const std::byte* data = buffer->data();
  const AlignedBuffer moved = *std::move(buffer);
  EXPECT_EQ(moved.data(), data);
}

TEST(AlignedBuffer, RefusesSizesThatCannotBe) {
  EXPECT_EQ(AlignedBuffer::Allocate(-1).status().code(), Code::kInvalidArgument);
  // Rounding these sizes up to the alignment would overflow.
  for (const int64_t bytes : {std::numeric_limits<int64_t>::max(), int64_t{1} << 62}) {
    const auto buffer = AlignedBuffer::Allocate(bytes);
    EXPECT_EQ(buffer.status().code(), Code::kOutOfMemory) << bytes;
    EXPECT_NE(buffer.status().message().find(std::to_string(bytes)), std::string::npos);
  }
}

}  // namespace
}  // namespace marlin::aligned_buffer_test
