// Norms, RoPE and append of many rows on the host: the bits of the decode kernels, with heads
// of every width, norms of every type, parts of heads that turn, and pages of every type.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "backends/cuda/attention/rotate_append_launch.h"
#include "base/scalars.h"
#include "cuda_emulation/emulate.h"
#include "delicate_squares.h"

namespace marlin::cuda {
namespace {

struct Case {
  int features;
  int pairs;
  int heads;
  int kv_heads;
  Element cache = Element::kBf16;
  Element query_norm = Element::kF32;
  Element key_norm = Element::kF32;
  bool has_query_norm = true;
  bool has_key_norm = true;
};

constexpr int kRows = 5;
constexpr int kPageTokens = 4;
constexpr int kPages = 4;
constexpr uint8_t kUntouched = 0x5a;

int BytesOf(Element type) {
  if (type == Element::kE4M3) return 1;
  return type == Element::kF32 ? 4 : 2;
}

/// Rows of two sequences: projections side by side, a cache in two slabs, and what they are worth.
class Rows {
 public:
  explicit Rows(const Case& c) : of_(c), width_((c.heads + 2 * c.kv_heads) * c.features + 4) {
    std::mt19937 random(static_cast<unsigned>(c.features * 31 + c.heads));
    std::normal_distribution<float> normal;
    projected.resize(size_t{kRows} * static_cast<size_t>(width_));
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < c.heads + 2 * c.kv_heads; ++i) {
        float* const head = projected.data() + row * width_ + i * c.features;
        cuda_emulation::FillDelicate({head, static_cast<size_t>(c.features)}, random);
        if (row % 2 != 0) std::generate_n(head, c.features, [&] { return normal(random); });
      }
    }
    for (int i = 0; i < c.features; ++i) {
      query_norm_.push_back(normal(random));
      key_norm_.push_back(normal(random));
    }
    for (int i = 0; i < c.pairs; ++i) frequencies_.push_back(1.0f / static_cast<float>(1 + 3 * i));
    page_ = 2 * c.kv_heads * kPageTokens * c.features;
    const int bytes = kPages * page_ * BytesOf(c.cache);
    cache.assign(static_cast<size_t>(bytes) / 16 + 1, Aligned{});
    for (Aligned& part : cache) std::fill_n(part.bytes, 16, kUntouched);
  }

  RotateAppendArguments Arguments() {
    const int64_t keys = int64_t{of_.heads} * of_.features;
    const int64_t values = keys + int64_t{of_.kv_heads} * of_.features;
    RotateAppendArguments args;
    args.queries = View(0, of_.heads);
    args.keys = View(keys, of_.kv_heads);
    args.values = View(values, of_.kv_heads);
    args.heads = of_.heads;
    if (of_.has_query_norm) args.query_norm = NormOf(of_.query_norm, query_norm_, &small_queries_);
    if (of_.has_key_norm) args.key_norm = NormOf(of_.key_norm, key_norm_, &small_keys_);
    args.query_norm_type = of_.query_norm;
    args.key_norm_type = of_.key_norm;
    args.epsilon = 0.0f;
    args.rotary = {frequencies_.data(), of_.pairs, 1.25f, false};
    args.sequences = {positions.data(), first_rows_.data(), tables.data(), kRows, 2, 3};
    PagesView& pages = args.pages;
    const int half = kPages / 2 * page_ * BytesOf(of_.cache);
    pages.slabs[0] = cache.data()->bytes;
    pages.slabs[1] = cache.data()->bytes + half;
    pages.slab_count = 2;
    pages.slab_pages = kPages / 2;
    pages.page_stride = page_;
    pages.type = of_.cache;
    pages.page_tokens = kPageTokens;
    pages.kv_heads = of_.kv_heads;
    pages.key_dim = pages.value_dim = of_.features;
    args.slabs_are_aligned = true;
    args.errors = {&record, &any};
    return args;
  }

  struct alignas(16) Aligned {
    uint8_t bytes[16];
    bool operator==(const Aligned&) const = default;
  };
  std::vector<float> projected;
  std::vector<Aligned> cache;
  std::vector<int32_t> positions = {2, 3, 4, 5, 9};
  std::vector<int32_t> tables = {3, 0, -1, -1, -1, 1};
  ValueRecord record;
  int any = 0;

 private:
  RowsView View(int64_t first, int heads) {
    RowsView view;
    view.data = projected.data() + first;
    view.inner = heads;
    view.rows = int64_t{kRows} * heads;
    view.stride = width_;
    view.inner_stride = of_.features;
    return view;
  }

  static const void* NormOf(Element type, const std::vector<float>& norm,
                            std::vector<uint16_t>* small) {
    if (type == Element::kF32) return norm.data();
    for (const float x : norm) {
      small->push_back(type == Element::kBf16 ? FloatToBf16(x) : FloatToHalf(x));
    }
    return small->data();
  }

  Case of_;
  int width_;
  int page_ = 0;
  std::vector<float> query_norm_;
  std::vector<float> key_norm_;
  std::vector<uint16_t> small_queries_;
  std::vector<uint16_t> small_keys_;
  std::vector<float> frequencies_;
  std::vector<int32_t> first_rows_ = {0, 4, kRows};
};

void ExpectBitsOfFewRows(const Case& c) {
  SCOPED_TRACE(testing::Message() << c.heads << " + 2 x " << c.kv_heads << " heads of "
                                  << c.features << ", " << c.pairs << " pairs");
  Rows many(c);
  Rows few(c);
  const RotateAppendArguments args = many.Arguments();
  ASSERT_TRUE(TakesRotateRows(args));
  ASSERT_EQ(LaunchRotateRows(args, nullptr), cudaSuccess);
  ASSERT_EQ(LaunchRotateAppend(few.Arguments(), nullptr), cudaSuccess);
  EXPECT_EQ(cuda_emulation::TakeFindings(), "");
  EXPECT_EQ(many.any + few.any, 0);
  EXPECT_NE(many.projected, Rows(c).projected);
  EXPECT_EQ(many.projected, few.projected);
  EXPECT_NE(many.cache, Rows(c).cache);
  EXPECT_EQ(many.cache, few.cache);
}

TEST(RotateRows, HasTheBitsOfFewRows) {
  ExpectBitsOfFewRows({128, 64, 8, 2});
  ExpectBitsOfFewRows({64, 32, 7, 1, Element::kE4M3, Element::kBf16, Element::kF16});
  // Quads of other heads in one warp, and norms of one kind of heads alone.
  ExpectBitsOfFewRows({128, 64, 5, 1, Element::kF32, Element::kF16, Element::kBf16, false});
  ExpectBitsOfFewRows({64, 32, 33, 3, Element::kF16, Element::kF32, Element::kF32, true, false});
  ExpectBitsOfFewRows({128, 64, 32, 4, Element::kBf16, Element::kF32, Element::kF32, false, false});
}

TEST(RotateRows, HasWarpsWithManyHeads) {
  ExpectBitsOfFewRows({64, 32, 45, 3});
  ExpectBitsOfFewRows({64, 32, 60, 2, Element::kF32});
  ExpectBitsOfFewRows({128, 64, 64, 8});
}

TEST(RotateRows, TurnsPartsOfHeads) {
  ExpectBitsOfFewRows({64, 0, 3, 1});
  ExpectBitsOfFewRows({96, 32, 2, 2, Element::kF32});
  ExpectBitsOfFewRows({128, 32, 9, 1, Element::kE4M3});
  ExpectBitsOfFewRows({192, 96, 3, 1, Element::kF16});
  ExpectBitsOfFewRows({192, 64, 3, 1});
  ExpectBitsOfFewRows({256, 128, 4, 2});
  ExpectBitsOfFewRows({256, 96, 1, 1});
  ExpectBitsOfFewRows({256, 32, 5, 1, Element::kE4M3});
}

TEST(RotateRows, TakesHeadsOfVectorsAlone) {
  Rows rows({128, 64, 8, 2});
  const RotateAppendArguments good = rows.Arguments();
  ASSERT_TRUE(TakesRotateRows(good));
  const auto takes = [&](const auto& change) {
    RotateAppendArguments args = good;
    change(args);
    return TakesRotateRows(args);
  };
  EXPECT_FALSE(takes([](auto& args) { args.queries.stride += 2; }));
  EXPECT_FALSE(takes([](auto& args) { args.keys.inner_stride += 1; }));
  EXPECT_FALSE(takes([](auto& args) { args.values.type = Element::kBf16; }));
  EXPECT_FALSE(takes([](auto& args) { args.pages.first_element = 2; }));
  EXPECT_FALSE(takes([](auto& args) { args.pages.value_dim = 64; }));
  EXPECT_FALSE(takes([](auto& args) { args.pages.key_dim = args.pages.value_dim = 80; }));
  EXPECT_FALSE(takes([](auto& args) { args.slabs_are_aligned = false; }));
  EXPECT_FALSE(takes([](auto& args) { args.rotary.interleaved = true; }));
  EXPECT_FALSE(takes([](auto& args) { args.rotary.pairs = 48; }));
}

TEST(RotateRows, RecordsWhatCannotBe) {
  const auto error_of = [](const auto& change) {
    Rows rows({64, 32, 4, 2});
    change(rows);
    EXPECT_EQ(LaunchRotateRows(rows.Arguments(), nullptr), cudaSuccess);
    EXPECT_EQ(cuda_emulation::TakeFindings(), "");
    EXPECT_NE(rows.any, 0);
    return static_cast<ValueError>(rows.record.value_error);
  };
  EXPECT_EQ(error_of([](Rows& rows) { rows.positions[4] = -1; }), ValueError::kPosition);
  EXPECT_EQ(error_of([](Rows& rows) { rows.positions[1] = 5; }), ValueError::kNextPosition);
  EXPECT_EQ(error_of([](Rows& rows) { rows.tables[5] = 4; }), ValueError::kPage);
  EXPECT_EQ(error_of([](Rows& rows) { rows.positions[4] = 12; }), ValueError::kBlock);
}

}  // namespace
}  // namespace marlin::cuda
