// ExpandLatents against its reference, term by term, on every ISA level of this CPU.
#include "ops/decoder/expand_latents.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "decoder_fixture.h"
#include "marlin/decoder.h"

namespace marlin::expand_latents_test {
namespace {

using ::testing::HasSubstr;

using ExpandLatentsOnEveryLevel = OnEveryLevel;
MARLIN_ON_EVERY_LEVEL(ExpandLatentsOnEveryLevel);

struct ExpandCase {
  int64_t heads, rank, nope, rope, value;
  DType latents, weights, out;
  int64_t unit = 1;  ///< Page size as a multiple of the device's positions.
};

constexpr ExpandCase kCases[] = {
    // Shapes of matrix units: DeepSeek's, panels of 64 outputs, one panel of latents.
    {2, 512, 128, 64, 128, DType::kBf16, DType::kBf16, DType::kBf16},
    {1, 512, 128, 64, 128, DType::kF8E4M3, DType::kBf16, DType::kBf16},
    {2, 256, 64, 32, 64, DType::kBf16, DType::kBf16, DType::kBf16, 2},
    {1, 128, 192, 64, 256, DType::kBf16, DType::kBf16, DType::kBf16},
    {3, 64, 64, 16, 128, DType::kF8E4M3, DType::kBf16, DType::kBf16, 2},
    // Others.
    {4, 32, 24, 16, 20, DType::kF32, DType::kF32, DType::kF32},
    {3, 64, 64, 8, 64, DType::kBf16, DType::kBf16, DType::kF32},
    {2, 70, 33, 5, 67, DType::kF32, DType::kBf16, DType::kBf16, 3},
    {1, 17, 1, 0, 1, DType::kF16, DType::kF16, DType::kF16},
    {2, 64, 64, 4, 64, DType::kBf16, DType::kBf16, DType::kBf16},
};

/// The error of a product: half an ULP of the result's type, and so much of the sum of the terms'
/// sizes.
constexpr double kRelative = 0x1p-19;

/// Cached latents of one sequence, whose pages are in no order, and what they expand to.
class Problem {
 public:
  Problem(const Device& device, const ExpandCase& c)
      : case_(c),
        page_tokens_(c.unit * *CachePageTokens(device)),
        tokens_(2 * page_tokens_ + page_tokens_ / 2 + 3),
        latents_(DType::kF32, {tokens_, 1, c.rank + c.rope}),
        key_weights_(c.weights, {c.heads, c.rank, c.nope}),
        value_weights_(c.weights, {c.heads, c.value, c.rank}),
        memory_(static_cast<size_t>(5 * page_tokens_ * (c.rank + c.rope) * 4) + 64),
        heads_memory_(static_cast<size_t>(3 * PageElements() * DTypeBytes(c.out)) + 64, 0xff) {
    // Every cache type has these numbers exactly.
    std::mt19937 random(7);
    std::uniform_int_distribution<int> eighths(-15, 15);
    for (int64_t i = 0; i < latents_.view().ElementCount(); ++i) {
      latents_.Set(i, static_cast<float>(eighths(random)) / 8);
    }
    key_weights_.Fill(2);
    value_weights_.Fill(3);
    slabs_[0] = memory_.data();
    slabs_[1] = memory_.data() + page_tokens_ * (c.rank + c.rope) * DTypeBytes(c.latents) * 2;
    slab_ = heads_memory_.data();
  }

  PagedCache latents() {
    const int64_t wide = case_.rank + case_.rope;
    return {slabs_, 2,    page_tokens_ * wide, 0,   case_.latents, page_tokens_,
            1,      wide, case_.rank,          true};
  }
  PagedCache heads() {
    return {{&slab_, 1},  3,           PageElements(),          0,           case_.out,
            page_tokens_, case_.heads, case_.nope + case_.rope, case_.value, false};
  }
  TensorView pages() const { return {pages_.data(), DType::kI32, {3}}; }
  /// The last page is not full, and of the second one only some tokens are wanted.
  TensorView counts() {
    counts_ = {static_cast<int32_t>(page_tokens_), static_cast<int32_t>(page_tokens_ / 2 + 1),
               static_cast<int32_t>(page_tokens_ / 2 + 3)};
    return {counts_.data(), DType::kI32, {3}};
  }
  TensorView key_weights() { return key_weights_.view(); }
  TensorView value_weights() { return value_weights_.view(); }
  std::vector<int32_t>& page_numbers() { return pages_; }

  Status Append(const Device& device) {
    positions_.resize(static_cast<size_t>(tokens_));
    std::iota(positions_.begin(), positions_.end(), 0);
    first_rows_ = {0, static_cast<int32_t>(tokens_)};
    const SequenceRows rows{{positions_.data(), DType::kI32, {tokens_}},
                            {first_rows_.data(), DType::kI32, {2}},
                            {pages_.data(), DType::kI32, {1, 3}}};
    return AppendToCache(device, latents_.view(), {}, rows, latents());
  }

  /// Compares what is in the memory of heads with the reference; other tokens are unwritten.
  void Check() {
    const ExpandCase& c = case_;
    const int64_t wide = c.rank + c.rope;
    const MutableTensorView all = latents_.view();
    const TensorView x(all.data(), DType::kF32, {tokens_, c.heads, c.rank}, {wide, 0, 1});
    TensorView transposed(key_weights_.view().data(), c.weights, {c.heads, c.nope, c.rank});
    transposed.set_stride(0, c.rank * c.nope);
    transposed.set_stride(1, 1);
    transposed.set_stride(2, c.nope);
    const std::vector<double> keys = reference::HeadProduct(x, transposed);
    const std::vector<double> values = reference::HeadProduct(x, value_weights_.view());
    const std::vector<double> rows = reference::Elements(latents_.view());
    got_ = reference::Elements(TensorView(heads_memory_.data(), case_.out, {3 * PageElements()}));
    for (int64_t token = 0; token < 3 * page_tokens_; ++token) {
      const int64_t page = token / page_tokens_;
      const int64_t place = token % page_tokens_;
      const bool wanted = place < counts_[static_cast<size_t>(page)];
      for (int64_t head = 0; head < c.heads; ++head) {
        const int64_t row = token * c.heads + head;
        const int64_t key = page * PageElements() + (head * page_tokens_ + place) * KeyDim();
        for (int64_t i = 0; i < KeyDim(); ++i) {
          const bool product = i < c.nope;
          const int64_t of_rope = token * wide + c.rank + i - c.nope;
          const double want =
              !wanted ? 0
                      : (product ? keys
                                 : rows)[static_cast<size_t>(product ? row * c.nope + i : of_rope)];
          ASSERT_NO_FATAL_FAILURE(Expect(key + i, wanted, product, want));
        }
        const int64_t value = page * PageElements() + c.heads * page_tokens_ * KeyDim() +
                              (head * page_tokens_ + place) * c.value;
        for (int64_t i = 0; i < c.value; ++i) {
          const double want = wanted ? values[static_cast<size_t>(row * c.value + i)] : 0;
          ASSERT_NO_FATAL_FAILURE(Expect(value + i, wanted, true, want));
        }
      }
    }
  }

 private:
  int64_t KeyDim() const { return case_.nope + case_.rope; }
  int64_t PageElements() const { return case_.heads * page_tokens_ * (KeyDim() + case_.value); }

  void Expect(int64_t element, bool wanted, bool product, double want) {
    const double got = got_[static_cast<size_t>(element)];
    if (!wanted) {
      ASSERT_TRUE(std::isnan(got)) << element;
      return;
    }
    // The terms are about 1 in size.
    const double sums = product ? kRelative * static_cast<double>(case_.rank) : 0;
    ASSERT_NEAR(got, want, sums + Unit(case_.out) / 2 * std::abs(want))
        << fmt::format("{} heads of {} from {} {}, element {}", case_.heads, case_.nope, case_.rank,
                       DTypeName(case_.latents), element);
  }

  ExpandCase case_;
  int64_t page_tokens_;
  int64_t tokens_;
  Tensor latents_;
  Tensor key_weights_;
  Tensor value_weights_;
  std::vector<uint8_t> memory_;
  std::vector<uint8_t> heads_memory_;
  std::vector<double> got_;
  void* slabs_[2];
  void* slab_;
  std::vector<int32_t> pages_ = {3, 0, 2};
  std::vector<int32_t> counts_;
  std::vector<int32_t> positions_;
  std::vector<int32_t> first_rows_;
};

TEST_P(ExpandLatentsOnEveryLevel, ExpandLatentsIsItsReference) {
  for (const ExpandCase& c : kCases) {
    Problem problem(device(), c);
    const Status appended = problem.Append(device());
    ASSERT_TRUE(appended.ok()) << appended.message();
    const Status status =
        ExpandLatents(device(), problem.latents(), problem.pages(), problem.counts(),
                      problem.key_weights(), problem.value_weights(), problem.heads());
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(device().Synchronize().ok());
    ASSERT_NO_FATAL_FAILURE(problem.Check());
  }
}

/// The error of a call, whether at once or when the device is done.
std::string ErrorOf(const Device& device, Problem& problem, const TensorView& counts,
                    const PagedCache& heads) {
  const Status status = ExpandLatents(device, problem.latents(), problem.pages(), counts,
                                      problem.key_weights(), problem.value_weights(), heads);
  const Status finished = device.Synchronize();
  return std::string(status.ok() ? finished.message() : status.message());
}

TEST_P(ExpandLatentsOnEveryLevel, ExpandLatentsRefusesWhatCannotBe) {
  for (const ExpandCase& c : {kCases[0], kCases[5]}) {
    Problem problem(device(), c);
    const TensorView counts = problem.counts();
    const int64_t unit = *CachePageTokens(device());
    PagedCache heads = problem.heads();
    problem.page_numbers()[1] = 4;
    EXPECT_THAT(ErrorOf(device(), problem, counts, heads), HasSubstr("pages: no page 4 at 1"));
    problem.page_numbers()[1] = -1;
    EXPECT_THAT(ErrorOf(device(), problem, counts, heads), HasSubstr("pages: no page -1 at 1"));
    problem.page_numbers()[1] = 0;
    const std::vector<int32_t> most(3, static_cast<int32_t>(unit + 1));
    EXPECT_THAT(ErrorOf(device(), problem, {most.data(), DType::kI32, {3}}, heads),
                HasSubstr(fmt::format("tokens: expected 0 to {}, got {} at", unit, unit + 1)));
    heads.slab_pages = 2;
    EXPECT_THAT(ErrorOf(device(), problem, counts, heads),
                HasSubstr("heads: expected a slab of 3 pages, got 1 of 2"));
    heads = problem.heads();
    --heads.key_dim;
    EXPECT_THAT(ErrorOf(device(), problem, counts, heads),
                HasSubstr(fmt::format("heads: expected keys of {} features", c.nope + c.rope)));
    heads = problem.heads();
    heads.page_tokens *= 2;
    heads.page_stride *= 2;
    EXPECT_THAT(ErrorOf(device(), problem, counts, heads), HasSubstr("tokens a page"));
    heads = problem.latents();
    EXPECT_THAT(ErrorOf(device(), problem, counts, heads),
                HasSubstr("heads: have their values in their keys"));
    heads = problem.heads();
    const PagedCache latents = problem.latents();
    heads.slabs = latents.slabs.first(1);
    EXPECT_THAT(ErrorOf(device(), problem, counts, heads), HasSubstr("heads: overlap the latents"));
  }
}

}  // namespace
}  // namespace marlin::expand_latents_test
