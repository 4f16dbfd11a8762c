// Copies of rows on the host: of every type, one element and four at a time.
#include "backends/cuda/rows/copy_rows.cuh"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/scalars.h"
#include "cuda_emulation/emulate.h"

namespace marlin::cuda {
namespace {

using enum Element;

/// The bits of small integers, which every type has, in a type.
struct Rows {
  Rows(Element type, int rows, int given_stride, bool filled)
      : bytes(type == kF32 ? 4 : 2),
        stride(given_stride),
        words(static_cast<size_t>(rows) * static_cast<size_t>(given_stride)) {
    view.data = words.data();
    view.type = type;
    view.rows = rows;
    view.stride = stride;
    for (int i = 0; filled && i < rows * stride; ++i) Set(i, static_cast<float>(i % 251));
  }
  uint32_t BitsOf(float value) const {
    if (view.type == kF32) return std::bit_cast<uint32_t>(value);
    return view.type == kBf16 ? FloatToBf16(value) : FloatToHalf(value);
  }
  uint32_t At(int i) const {
    uint32_t bits = 0;
    std::memcpy(&bits, reinterpret_cast<const uint8_t*>(words.data()) + i * bytes,
                static_cast<size_t>(bytes));
    return bits;
  }
  void Set(int i, float value) {
    const uint32_t bits = BitsOf(value);
    std::memcpy(reinterpret_cast<uint8_t*>(words.data()) + i * bytes, &bits,
                static_cast<size_t>(bytes));
  }

  int bytes;
  int stride;
  struct alignas(16) Word {
    uint32_t of[4];
  };
  std::vector<Word> words;
  RowsView view;
};

template <int kAdjacent>
void ExpectCopies(Element from_type, Element to_type, int columns) {
  Rows from(from_type, 7, columns + 8, true);
  const std::vector<int64_t> ids = {6, 0, 3, 3, 5};
  for (const bool looks_up : {false, true}) {
    Rows to(to_type, 5, columns + 4, false);
    CopyRowsArguments args{from.view, to.view, {}, columns, {}};
    if (looks_up) args.ids = {ids.data(), true};
    if (kAdjacent == 4) {
      EXPECT_TRUE(CopiesQuads(args));
    }
    ASSERT_EQ(cuda_emulation::Emulate(&CopyRowsKernel<kAdjacent>,
                                      {dim3(2, columns > 500 ? 2 : 1), kCopyThreads, 0}, args),
              "");
    for (int row = 0; row < 5; ++row) {
      const int copied = looks_up ? static_cast<int>(ids[static_cast<size_t>(row)]) : row;
      for (int i = 0; i < to.stride; ++i) {
        const auto value = static_cast<float>((copied * from.stride + i) % 251);
        ASSERT_EQ(to.At(row * to.stride + i), i < columns ? to.BitsOf(value) : 0)
            << row << " " << i << " of " << columns;
      }
    }
  }
}

TEST(CopyRows, OfEveryType) {
  for (const Element from : {kF32, kBf16, kF16}) {
    for (const Element to : {kF32, kBf16, kF16}) {
      ExpectCopies<1>(from, to, 301);
      ExpectCopies<4>(from, to, 300);
    }
  }
  ExpectCopies<4>(kBf16, kF32, 2504);
}

TEST(CopyRows, TakesAlignedQuadsAlone) {
  Rows from(kBf16, 2, 16, true);
  Rows to(kF32, 2, 16, false);
  const CopyRowsArguments good{from.view, to.view, {}, 16, {}};
  ASSERT_TRUE(CopiesQuads(good));
  const auto takes = [&](const auto& change) {
    CopyRowsArguments args = good;
    change(args);
    return CopiesQuads(args);
  };
  EXPECT_FALSE(takes([](auto& args) { args.columns = 14; }));
  EXPECT_FALSE(takes([](auto& args) { args.from.stride = 18; }));
  EXPECT_FALSE(takes([](auto& args) { args.out.inner_stride = 2; }));
  EXPECT_FALSE(takes([](auto& args) { args.from.type = kE4M3; }));
  EXPECT_FALSE(takes([](auto& args) { args.out.data = static_cast<uint8_t*>(args.out.data) + 8; }));
}

TEST(CopyRows, RecordsRowsThatAreNot) {
  Rows from(kF32, 3, 8, true);
  Rows to(kF32, 2, 8, false);
  const std::vector<int32_t> ids = {2, 3};
  ValueRecord record;
  int any = 0;
  const CopyRowsArguments args{from.view, to.view, {ids.data(), false}, 8, {&record, &any}};
  ASSERT_EQ(cuda_emulation::Emulate(&CopyRowsKernel<4>, {dim3(2), kCopyThreads, 0}, args), "");
  EXPECT_EQ(static_cast<ValueError>(record.value_error), ValueError::kIds);
  EXPECT_EQ(record.numbers[0], 3);
  EXPECT_EQ(to.At(7), to.BitsOf(23));
  EXPECT_EQ(to.At(8), 0);
}

}  // namespace
}  // namespace marlin::cuda
