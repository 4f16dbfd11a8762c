// The fused operations before attention give the bits of the operations that they fuse, on every
// ISA level of this CPU.
#include <gmock/gmock.h>

#include <utility>
#include <vector>

#include "base/macros.h"
#include "decoder_fixture.h"
#include "marlin/decoder.h"

namespace marlin::rotate_append_test {
namespace {

using ::testing::HasSubstr;

using RotateAppendOnEveryLevel = OnEveryLevel;
MARLIN_ON_EVERY_LEVEL(RotateAppendOnEveryLevel);

TEST_P(RotateAppendOnEveryLevel, AddRmsNormIsAddToAndRmsNorm) {
  unsigned seed = 1;
  for (const DType type : kTypes) {
    for (const int64_t columns : {1, 33, 512, 2048, 9000}) {
      const DType out_type = kTypes[++seed % 3];
      Tensor residual(type, {3, columns}, 8);
      Tensor block(kTypes[seed % 2], {3, columns}, 4);
      Tensor weight(DType::kF32, {columns});
      Tensor out(out_type, {3, columns}, 2);
      Tensor twin(type, {3, columns}, 8);
      Tensor want(out_type, {3, columns}, 2);
      block.Fill(seed, 2.0);
      weight.Fill(seed + 1);
      residual.Fill(seed + 2);
      twin.Fill(seed + 2);
      ASSERT_TRUE(
          AddRmsNorm(device(), block.view(), residual.view(), weight.view(), 1e-5F, out.view())
              .ok());
      ASSERT_TRUE(AddTo(device(), block.view(), twin.view()).ok());
      ASSERT_TRUE(RmsNorm(device(), twin.view(), weight.view(), 1e-5F, want.view()).ok());
      ASSERT_TRUE(device().Synchronize().ok());
      EXPECT_EQ(reference::Elements(residual.view()), reference::Elements(twin.view())) << columns;
      EXPECT_EQ(reference::Elements(out.view()), reference::Elements(want.view())) << columns;
    }
  }
}

TEST_P(RotateAppendOnEveryLevel, ManyRowsAreNormedAsFew) {
  constexpr int64_t kRows = 540;
  for (const auto& [columns, adds] : {std::pair<int64_t, bool>(516, false), {1028, true}}) {
    const auto run = [&, width = columns, sums = adds](const std::vector<int64_t>& parts) {
      Tensor residual(DType::kF32, {kRows, width}, 4);
      Tensor block(DType::kF32, {kRows, width}, 8);
      Tensor weight(DType::kF32, {width});
      Tensor out(DType::kBf16, {kRows, width}, 4);
      residual.Fill(31, 2.0);
      block.Fill(32);
      weight.Fill(33);
      int64_t first = 0;
      for (const int64_t rows : parts) {
        const auto part = [&](Tensor& all) {
          const MutableTensorView view = all.view();
          const int64_t before = first * view.stride(0) * DTypeBytes(view.dtype());
          return MutableTensorView(view.As<uint8_t>() + before, view.dtype(), {rows, width},
                                   {view.stride(0), 1});
        };
        const Status status =
            sums
                ? AddRmsNorm(device(), part(block), part(residual), weight.view(), 1e-5F, part(out))
                : RmsNorm(device(), part(residual), weight.view(), 1e-5F, part(out));
        EXPECT_TRUE(status.ok()) << status.message();
        first += rows;
      }
      EXPECT_TRUE(device().Synchronize().ok());
      return std::pair(reference::Elements(residual.view()), reference::Elements(out.view()));
    };
    EXPECT_EQ(run({kRows}), run({300, kRows - 300})) << columns;
  }
}

struct HeadsCase {
  DType type;   ///< Type of the projections.
  DType cache;  ///< Type of the cache.
  int64_t heads, kv_heads, key_dim, value_dim, pairs;
  bool norms;
  bool interleaved;
  int64_t padding = 6;  ///< Elements between rows of projections.
};

constexpr HeadsCase kHeadsCases[] = {
    {DType::kF32, DType::kBf16, 8, 2, 64, 64, 32, true, false},
    {DType::kF32, DType::kF32, 3, 3, 40, 24, 10, false, true},
    {DType::kBf16, DType::kBf16, 4, 1, 128, 96, 64, true, true},
    {DType::kF16, DType::kF16, 5, 1, 33, 17, 16, true, false},
    {DType::kF32, DType::kBf16, 2, 1, 600, 64, 300, true, false},
    {DType::kF32, DType::kF8E4M3, 8, 2, 64, 64, 32, true, false},
    {DType::kBf16, DType::kF8E4M3, 5, 1, 33, 17, 16, true, true},
    {DType::kF32, DType::kF8E4M3, 2, 1, 600, 64, 300, false, false},
    // Rows at multiples of 16 bytes: heads of vectors.
    {DType::kF32, DType::kBf16, 8, 2, 128, 128, 64, true, false, 8},
    {DType::kF32, DType::kF8E4M3, 4, 4, 64, 64, 32, false, false, 8},
    {DType::kF32, DType::kF32, 9, 3, 128, 128, 64, false, false, 8},
    {DType::kF32, DType::kF16, 5, 1, 64, 64, 32, true, false, 8},
    {DType::kF32, DType::kBf16, 8, 2, 128, 128, 32, true, false, 8},
    // Heads that do not rotate.
    {DType::kF32, DType::kBf16, 8, 2, 128, 128, 0, true, false, 8},
    {DType::kBf16, DType::kF32, 3, 1, 24, 24, 0, false, false},
};

/// Rows of two sequences, their projections and a cache in one slab.
class Step {
 public:
  Step(const Device& device, const HeadsCase& c, unsigned seed)
      : case_(c),
        page_tokens_(*CachePageTokens(device)),
        row_((c.heads + c.kv_heads) * c.key_dim + c.kv_heads * c.value_dim),
        projected_(c.type, {kRows, row_}, c.padding) {
    projected_.Fill(seed, 2.0);
    page_ = c.kv_heads * page_tokens_ * (c.key_dim + c.value_dim);
    memory_.assign(static_cast<size_t>(4 * page_ * DTypeBytes(c.cache)) + 64, 0x5a);
    slab_ = memory_.data();
    positions_ = {0, 1, static_cast<int32_t>(page_tokens_) + 7};
  }

  AttentionHeads heads() {
    const int64_t keys = case_.heads * case_.key_dim;
    const int64_t values = keys + case_.kv_heads * case_.key_dim;
    return {Part(0, case_.heads, case_.key_dim), Part(keys, case_.kv_heads, case_.key_dim),
            Part(values, case_.kv_heads, case_.value_dim)};
  }
  SequenceRows rows() const {
    return {{positions_.data(), DType::kI32, {kRows}},
            {first_rows_.data(), DType::kI32, {3}},
            {tables_.data(), DType::kI32, {2, 2}}};
  }
  PagedCache cache() const {
    return {{&slab_, 1},    4, page_, 0, case_.cache, page_tokens_, case_.kv_heads, case_.key_dim,
            case_.value_dim};
  }
  const std::vector<uint8_t>& memory() const { return memory_; }
  std::vector<int32_t>& positions() { return positions_; }
  std::vector<int32_t>& tables() { return tables_; }

 private:
  static constexpr int64_t kRows = 3;

  MutableTensorView Part(int64_t first, int64_t heads, int64_t width) {
    const MutableTensorView all = projected_.view();
    auto* const data = all.As<uint8_t>() + first * DTypeBytes(all.dtype());
    return {data, all.dtype(), {kRows, heads, width}, {all.stride(0), width, 1}};
  }

  HeadsCase case_;
  int64_t page_tokens_;
  int64_t row_;
  Tensor projected_;
  int64_t page_ = 0;
  std::vector<uint8_t> memory_;
  void* slab_ = nullptr;
  std::vector<int32_t> positions_;
  std::vector<int32_t> first_rows_ = {0, 2, 3};
  std::vector<int32_t> tables_ = {2, -1, 0, 3};
};

class Parameters {
 public:
  explicit Parameters(const HeadsCase& c)
      : queries_(DType::kF32, {c.key_dim}), keys_(DType::kBf16, {c.key_dim}) {
    queries_.Fill(91);
    keys_.Fill(92);
    for (int64_t i = 0; i < c.pairs; ++i) {
      frequencies_.push_back(1.0F / static_cast<float>(1 + 3 * i));
    }
    rotary = {{frequencies_.data(), DType::kF32, {c.pairs}}, 1.25F, c.interleaved};
    if (c.norms) norms = {queries_.view(), keys_.view(), 1e-6F};
  }
  HeadNorms norms;
  RotaryEmbedding rotary;

 private:
  Tensor queries_;
  Tensor keys_;
  std::vector<float> frequencies_;
};

TEST_P(RotateAppendOnEveryLevel, RotateAndAppendIsNormRotaryAndAppend) {
  unsigned seed = 10;
  for (const HeadsCase& c : kHeadsCases) {
    const Parameters parameters(c);
    Step fused(device(), c, ++seed);
    Step unfused(device(), c, seed);
    const Status status = RotateAndAppend(device(), fused.heads(), parameters.norms,
                                          parameters.rotary, fused.rows(), fused.cache());
    ASSERT_TRUE(status.ok()) << status.message();
    const AttentionHeads heads = unfused.heads();
    if (c.norms) {
      ASSERT_TRUE(
          RmsNorm(device(), heads.queries, parameters.norms.queries, 1e-6F, heads.queries).ok());
      ASSERT_TRUE(RmsNorm(device(), heads.keys, parameters.norms.keys, 1e-6F, heads.keys).ok());
    }
    for (const MutableTensorView& x : {heads.queries, heads.keys}) {
      if (c.pairs == 0) break;
      ASSERT_TRUE(ApplyRotary(device(), parameters.rotary, unfused.rows().positions, x).ok());
    }
    ASSERT_TRUE(
        AppendToCache(device(), heads.keys, heads.values, unfused.rows(), unfused.cache()).ok());
    ASSERT_TRUE(device().Synchronize().ok());
    EXPECT_EQ(reference::Elements(fused.heads().queries),
              reference::Elements(unfused.heads().queries))
        << c.key_dim;
    EXPECT_EQ(fused.memory(), unfused.memory()) << c.key_dim;
  }
}

/// A prompt of one sequence, appended in parts.
class Prompt {
 public:
  static constexpr int64_t kRows = 300;

  Prompt(const Device& device, const HeadsCase& c)
      : case_(c),
        page_tokens_(*CachePageTokens(device)),
        projected_(c.type, {kRows, (c.heads + 2 * c.kv_heads) * c.key_dim}, c.padding) {
    projected_.Fill(77, 2.0);
    page_ = 2 * c.kv_heads * page_tokens_ * c.key_dim;
    for (int32_t row = 0; row < kRows; ++row) positions_.push_back(row);
    const int64_t pages = (kRows + page_tokens_ - 1) / page_tokens_;
    for (int64_t page = 0; page < pages; ++page) table_.push_back(static_cast<int32_t>(page));
    memory_.assign(static_cast<size_t>(pages * page_ * DTypeBytes(c.cache)) + 64, 0x5a);
    slab_ = memory_.data();
  }

  Status Append(const Device& device, const Parameters& parameters, int64_t first, int64_t count) {
    const int64_t keys = case_.heads * case_.key_dim;
    const int64_t values = keys + case_.kv_heads * case_.key_dim;
    const auto blocks = static_cast<int64_t>(table_.size());
    const std::vector<int32_t> first_rows = {0, static_cast<int32_t>(count)};
    const AttentionHeads heads = {Part(first, count, 0, case_.heads),
                                  Part(first, count, keys, case_.kv_heads),
                                  Part(first, count, values, case_.kv_heads)};
    const SequenceRows rows = {{positions_.data() + first, DType::kI32, {count}},
                               {first_rows.data(), DType::kI32, {2}},
                               {table_.data(), DType::kI32, {1, blocks}}};
    const PagedCache cache = {{&slab_, 1},  blocks,       page_,          0,
                              case_.cache,  page_tokens_, case_.kv_heads, case_.key_dim,
                              case_.key_dim};
    MARLIN_RETURN_IF_ERROR(
        RotateAndAppend(device, heads, parameters.norms, parameters.rotary, rows, cache));
    return device.Synchronize();
  }
  std::vector<double> projected() { return reference::Elements(projected_.view()); }
  const std::vector<uint8_t>& memory() const { return memory_; }

 private:
  MutableTensorView Part(int64_t first, int64_t count, int64_t column, int64_t heads) {
    const MutableTensorView all = projected_.view();
    auto* const data =
        all.As<uint8_t>() + (first * all.stride(0) + column) * DTypeBytes(all.dtype());
    return {data, all.dtype(), {count, heads, case_.key_dim}, {all.stride(0), case_.key_dim, 1}};
  }

  HeadsCase case_;
  int64_t page_tokens_;
  Tensor projected_;
  int64_t page_ = 0;
  std::vector<uint8_t> memory_;
  void* slab_ = nullptr;
  std::vector<int32_t> positions_;
  std::vector<int32_t> table_;
};

TEST_P(RotateAppendOnEveryLevel, ManyRowsHaveTheBitsOfFew) {
  for (const HeadsCase& c : {HeadsCase{DType::kF32, DType::kBf16, 9, 2, 128, 128, 64, true, false},
                             {DType::kF32, DType::kF8E4M3, 4, 1, 64, 64, 32, true, false},
                             {DType::kF32, DType::kF32, 2, 1, 256, 256, 32, true, false}}) {
    HeadsCase aligned = c;
    aligned.padding = 8;
    const Parameters parameters(aligned);
    Prompt whole(device(), aligned);
    Prompt parts(device(), aligned);
    ASSERT_TRUE(whole.Append(device(), parameters, 0, Prompt::kRows).ok());
    ASSERT_TRUE(parts.Append(device(), parameters, 0, 170).ok());
    ASSERT_TRUE(parts.Append(device(), parameters, 170, Prompt::kRows - 170).ok());
    EXPECT_EQ(whole.projected(), parts.projected()) << c.key_dim;
    EXPECT_EQ(whole.memory(), parts.memory()) << c.key_dim;
  }
}

TEST(RotateAndAppend, ErrorsNameWhatCannotBe) {
  const Device device = *Device::Open("cpu", {.threads = 2});
  const HeadsCase& c = kHeadsCases[0];
  const Parameters parameters(c);
  Step step(device, c, 1);
  const auto run = [&](const AttentionHeads& heads, const HeadNorms& norms,
                       const PagedCache& cache) {
    const Status status =
        RotateAndAppend(device, heads, norms, parameters.rotary, step.rows(), cache);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  PagedCache latent = step.cache();
  latent.values_in_keys = true;
  EXPECT_THAT(run(step.heads(), parameters.norms, latent), HasSubstr("has the values in its keys"));
  AttentionHeads heads = step.heads();
  heads.keys = heads.queries;
  EXPECT_THAT(run(heads, parameters.norms, step.cache()), HasSubstr("keys: expected [3, 2, 64]"));
  heads = step.heads();
  heads.values = heads.keys;
  EXPECT_THAT(run(heads, parameters.norms, step.cache()), HasSubstr("overlap"));
  HeadNorms norms = parameters.norms;
  norms.keys = TensorView(norms.keys.data(), norms.keys.dtype(), {63});
  EXPECT_THAT(run(step.heads(), norms, step.cache()), HasSubstr("norms.keys: expected [64]"));
  step.positions()[1] = 5;
  EXPECT_THAT(run(step.heads(), parameters.norms, step.cache()),
              HasSubstr("positions: expected 1, got 5 at 1"));
  step.positions()[1] = 1;
  step.tables()[3] = 4;
  EXPECT_THAT(run(step.heads(), parameters.norms, step.cache()),
              HasSubstr("no page 4 for block 1 of sequence 1"));
}

}  // namespace
}  // namespace marlin::rotate_append_test
