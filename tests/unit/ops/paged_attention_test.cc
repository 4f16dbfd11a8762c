// Paged KV cache: attention with it gives the bits of attention without it, on every ISA level of
// this CPU, and invalid memory is refused.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <memory>
#include <numeric>

#include "base/checked.h"
#include "decoder_fixture.h"
#include "marlin/decoder.h"

namespace marlin::paged_attention_test {
namespace {

using ::testing::HasSubstr;

using PagedAttentionOnEveryLevel = OnEveryLevel;
MARLIN_ON_EVERY_LEVEL(PagedAttentionOnEveryLevel);

constexpr int64_t kSequences = 3;

struct CacheCase {
  DType type;
  int64_t heads, kv_heads, key_dim, value_dim, window;
  int64_t unit = 1;  ///< Page size as a multiple of the device's positions.
  bool values_in_keys = false;
  bool sinks = false;
  float softcap = 0;
  bool chunked = false;
};

constexpr CacheCase kCases[] = {
    {DType::kF32, 4, 2, 32, 32, 0},
    {DType::kBf16, 8, 2, 64, 64, 0, 1, false, true},
    {DType::kBf16, 6, 6, 40, 24, 300, 2},
    {DType::kF16, 4, 1, 33, 17, 20},
    {DType::kBf16, 16, 1, 96, 64, 0, 1, true},
    {DType::kF32, 8, 1, 48, 32, 257, 1, true, true},
    // Heads that fill matrix units: groups of 8 and of 20 queries, wide and narrow values.
    {DType::kBf16, 16, 2, 128, 128, 0},
    {DType::kBf16, 20, 1, 80, 48, 100, 2, false, true},
    {DType::kBf16, 2, 2, 192, 256, 0},
    {DType::kBf16, 12, 4, 192, 128, 0, 1, false, true},
    {DType::kBf16, 4, 4, 256, 112, 300},
    {DType::kF8E4M3, 16, 2, 128, 128, 0},
    {DType::kF8E4M3, 20, 1, 80, 48, 100, 2, false, true},
    {DType::kF8E4M3, 2, 2, 192, 256, 0},
    {DType::kF8E4M3, 12, 4, 192, 128, 90},
    {DType::kF8E4M3, 8, 2, 64, 80, 257},
    {DType::kF8E4M3, 6, 6, 40, 24, 300, 2},
    {DType::kF8E4M3, 4, 1, 33, 17, 20},
    {DType::kF8E4M3, 16, 1, 96, 64, 0, 1, true},
    {DType::kBf16, 4, 2, 512, 512, 0},
    {DType::kF8E4M3, 4, 2, 512, 512, 0},
    {DType::kBf16, 8, 4, 256, 256, 100, 1, false, false, 5.0F},
    {DType::kF8E4M3, 8, 2, 64, 64, 0, 1, false, false, 5.0F},
    // Chunks shorter and longer than a call's rows, and than a page.
    {DType::kBf16, 10, 2, 128, 128, 48, 1, false, false, 0, true},
    {DType::kBf16, 10, 2, 128, 128, 300, 1, false, false, 0, true},
    {DType::kF8E4M3, 5, 1, 128, 128, 7, 2, false, false, 0, true},
    {DType::kF32, 4, 2, 32, 32, 100, 1, false, false, 0, true},
};

// The latent of MLA, of 16 heads as in DeepSeek-V2-Lite and of more; windows and sinks as well.
constexpr CacheCase kLatentCases[] = {
    {DType::kBf16, 16, 1, 576, 512, 0, 1, true},
    {DType::kF8E4M3, 16, 1, 576, 512, 0, 1, true},
    {DType::kBf16, 40, 1, 576, 512, 0, 1, true},
    {DType::kF8E4M3, 40, 1, 320, 256, 100, 2, true, true},
    {DType::kBf16, 10, 2, 144, 80, 257, 1, true, true},
};

/// The type of tensors that hold the numbers of a cache: bf16 has all of e4m3.
DType TensorType(DType cache) { return cache == DType::kF8E4M3 ? DType::kBf16 : cache; }

/// f32 numbers as a cache of a type rounds them.
void RoundAs(DType cache, const MutableTensorView& x) {
  if (cache != DType::kF8E4M3) return;
  const auto round = [&](int64_t at) {
    x.As<float>()[at] = Fp8E4M3ToFloat(FloatToFp8E4M3(x.As<float>()[at]));
  };
  for (int64_t row = 0; row < x.dim(0); ++row) {
    for (int64_t head = 0; head < x.dim(1); ++head) {
      for (int64_t i = 0; i < x.dim(2); ++i) round(row * x.stride(0) + head * x.stride(1) + i);
    }
  }
}

/// Three sequences of different lengths in one paged cache, fed in parts, and the same keys and
/// values in one tensor each.
class Caches {
 public:
  Caches(const Device& device, const CacheCase& c)
      : device_(device),
        case_(c),
        page_tokens_(c.unit * *CachePageTokens(device)),
        slab_pages_(kSequences * CeilDivide(kLength, page_tokens_) / 2 + 1) {
    const int64_t features = c.key_dim + (c.values_in_keys ? 0 : c.value_dim);
    part_ = c.kv_heads * page_tokens_ * features;
    // A page holds two layers, and this one is the second; NaN everywhere.
    for (auto& slab : memory_) slab.assign(static_cast<size_t>(slab_pages_ * 2 * part_ * 4), 0xff);
    for (size_t i = 0; i < memory_.size(); ++i) slabs_[i] = i == 1 ? nullptr : memory_[i].data();
    // Pages of slabs 2 and 0 in reverse order.
    for (int32_t page = 0; page < 3 * slab_pages_; ++page) {
      if (page / slab_pages_ != 1) free_.push_back(page);
    }
    sinks_.assign(static_cast<size_t>(c.heads), 0.3F);
    for (int64_t s = 0; s < kSequences; ++s) {
      keys_.push_back(Tensor::ByHead(TensorType(c.type), {kLength, c.kv_heads, c.key_dim}));
      values_.push_back(Tensor::ByHead(TensorType(c.type), {kLength, c.kv_heads, c.value_dim}));
    }
  }

  PagedCache cache() const {
    return {slabs_,       slab_pages_,    2 * part_,     part_,           case_.type,
            page_tokens_, case_.kv_heads, case_.key_dim, case_.value_dim, case_.values_in_keys};
  }

  /// Feeds tokens[s] new tokens of sequence s, and expects the bits of Attention.
  void Feed(const std::array<int64_t, kSequences>& tokens, unsigned seed) {
    const int64_t rows = std::accumulate(tokens.begin(), tokens.end(), int64_t{0});
    Tensor q(DType::kF32, {rows, case_.heads, case_.key_dim}, 3);
    Tensor k(DType::kF32, {rows, case_.kv_heads, case_.key_dim}, 2);
    Tensor v(DType::kF32, {rows, case_.kv_heads, case_.value_dim}, 1);
    q.Fill(seed, 1.5);
    k.Fill(seed + 1);
    v.Fill(seed + 2);
    Describe(tokens);
    const Status appended =
        AppendToCache(device_, k.view(), case_.values_in_keys ? TensorView() : TensorView(v.view()),
                      Rows(), cache());
    ASSERT_TRUE(appended.ok()) << appended.message();
    ASSERT_TRUE(device_.Synchronize().ok());
    RoundAs(case_.type, k.view());
    RoundAs(case_.type, v.view());
    // With two bf16 terms, with one, and in fp32: once each.
    for (int way = 0; way < kWays; ++way) {
      const bool exact = way == kWays - 1;
      AttentionOptions options;
      options.window = case_.window;
      options.softcap = case_.softcap;
      options.chunked = case_.chunked;
      options.accuracy = exact ? Accuracy::kExact : Accuracy::kDefault;
      options.allow_bf16_activations = way == 1;
      if (case_.sinks) options.sinks = {sinks_.data(), DType::kF32, {case_.heads}};
      Tensor out(DType::kF32, {rows, case_.heads, case_.value_dim});
      const Status status = PagedAttention(device_, q.view(), Rows(), cache(), out.view(), options);
      ASSERT_TRUE(status.ok()) << status.message();
      Tensor want(DType::kF32, {rows, case_.heads, case_.value_dim});
      const std::vector<AttentionInput> inputs = Inputs(tokens, q, k, v, want);
      ASSERT_TRUE(Attention(device_, inputs, options).ok());
      const std::string lengths = fmt::format("{} {} {}", lengths_[0], lengths_[1], lengths_[2]);
      if (exact || device_.info().backend != "cuda") {
        EXPECT_EQ(reference::Elements(out.view()), reference::Elements(want.view())) << lengths;
        continue;
      }
      // Matrix units: what one or two bf16 terms do not hold.
      ASSERT_TRUE(device_.Synchronize().ok());
      const double bound = way == 1 ? 0.03 : 2e-4;
      ExpectNear(out.view(), reference::Elements(want.view()), bound / 2, bound, lengths);
    }
  }

  SequenceRows Rows() const {
    return {{positions_.data(), DType::kI32, {static_cast<int64_t>(positions_.size())}},
            {first_rows_.data(), DType::kI32, {kSequences + 1}},
            {tables_.data(), DType::kI32, {kSequences, blocks_}}};
  }
  std::vector<int32_t>& positions() { return positions_; }
  std::vector<int32_t>& first_rows() { return first_rows_; }
  std::vector<int32_t>& tables() { return tables_; }
  int64_t page_tokens() const { return page_tokens_; }

 private:
  static constexpr int64_t kLength = 1200;
  static constexpr int kWays = 3;  ///< Accuracies with which a call is computed.

  /// Writes the rows and tables of a call. Blocks that are not visible to any row lose their pages.
  void Describe(const std::array<int64_t, kSequences>& tokens) {
    positions_.clear();
    first_rows_ = {0};
    blocks_ = 0;
    for (size_t s = 0; s < kSequences; ++s) {
      const int64_t end = lengths_[s] + tokens[s];
      while (static_cast<int64_t>(pages_[s].size()) * page_tokens_ < end) {
        pages_[s].push_back(free_.back());
        free_.pop_back();
      }
      blocks_ = std::max(blocks_, static_cast<int64_t>(pages_[s].size()));
      for (int64_t i = lengths_[s]; i < end; ++i) positions_.push_back(static_cast<int32_t>(i));
      first_rows_.push_back(static_cast<int32_t>(positions_.size()));
      const int64_t seen = case_.window > 0 ? lengths_[s] - case_.window + 1 : 0;
      for (int64_t block = 0; (block + 1) * page_tokens_ <= seen; ++block) {
        pages_[s][static_cast<size_t>(block)] = -1;
      }
    }
    tables_.clear();
    for (const std::vector<int32_t>& pages : pages_) {
      tables_.insert(tables_.end(), pages.begin(), pages.end());
      tables_.resize(tables_.size() + static_cast<size_t>(blocks_) - pages.size(), -77);
    }
  }

  static TensorView RowsOf(const TensorView& view, int64_t first, int64_t count) {
    return {view.As<uint8_t>() + first * view.stride(0) * DTypeBytes(view.dtype()),
            view.dtype(),
            {count, view.dim(1), view.dim(2)},
            {view.stride(0), view.stride(1), 1}};
  }

  /// Appends the new tokens' keys and values, rounded as in the cache.
  std::vector<AttentionInput> Inputs(const std::array<int64_t, kSequences>& tokens, Tensor& q,
                                     Tensor& k, Tensor& v, Tensor& out) {
    std::vector<AttentionInput> inputs;
    int64_t row = 0;
    calls_ = (calls_ + 1) % kWays;
    for (size_t s = 0; s < kSequences; ++s) {
      const int64_t count = tokens[s];
      const auto part = [&](Tensor& tensor) {
        const TensorView view = RowsOf(tensor.view(), lengths_[s], count);
        MutableTensorView to(const_cast<void*>(view.data()), view.dtype(), view.shape());
        for (int i = 0; i < 3; ++i) to.set_stride(i, view.stride(i));
        return to;
      };
      EXPECT_TRUE(Convert(device_, RowsOf(k.view(), row, count), part(keys_[s])).ok());
      EXPECT_TRUE(Convert(device_, RowsOf(v.view(), row, count), part(values_[s])).ok());
      const int64_t length = lengths_[s] + count;
      const TensorView keys = RowsOf(keys_[s].view(), 0, length);
      const TensorView first_features(keys.data(), keys.dtype(),
                                      {length, keys.dim(1), case_.value_dim},
                                      {keys.stride(0), keys.stride(1), 1});
      const TensorView to = RowsOf(out.view(), row, count);
      inputs.push_back(
          {RowsOf(q.view(), row, count),
           keys,
           case_.values_in_keys ? first_features : RowsOf(values_[s].view(), 0, length),
           {const_cast<void*>(to.data()),
            to.dtype(),
            to.shape(),
            {to.stride(0), to.stride(1), 1}}});
      row += count;
      // The other calls of a part see the same tokens.
      if (calls_ == 0) lengths_[s] += count;
    }
    return inputs;
  }

  const Device& device_;
  CacheCase case_;
  int64_t page_tokens_;
  int64_t slab_pages_;  ///< Pages of each of three slabs, of which two hold all sequences.
  int64_t part_ = 0;
  std::array<std::vector<uint8_t>, 3> memory_;
  std::array<void*, 3> slabs_{};
  std::vector<int32_t> free_;
  std::vector<float> sinks_;
  std::vector<Tensor> keys_;
  std::vector<Tensor> values_;
  std::array<int64_t, kSequences> lengths_{};
  std::array<std::vector<int32_t>, kSequences> pages_;
  std::vector<int32_t> positions_;
  std::vector<int32_t> first_rows_;
  std::vector<int32_t> tables_;
  int64_t blocks_ = 0;
  int calls_ = 0;  ///< Attention's, to the tokens that were appended last.
};

void FeedAll(const Device& device, const CacheCase& c,
             std::initializer_list<std::array<int64_t, kSequences>> feeds) {
  unsigned seed = 0;
  Caches caches(device, c);
  for (const std::array<int64_t, kSequences>& tokens : feeds) caches.Feed(tokens, seed += 10);
}

TEST_P(PagedAttentionOnEveryLevel, PagesGiveTheBitsOfOneTensor) {
  const bool simulated = device().info().backend == "metal";
  for (const CacheCase& c : kCases) {
    if (simulated) {
      // Minutes in the simulator: simulated_attention_test.cc has the other cases and tokens.
      if ((&c - kCases) % 6 == 1) FeedAll(device(), c, {{5, 0, 10}, {1, 1, 1}});
      continue;
    }
    FeedAll(device(), c, {{5, 0, 300}, {1, 1, 1}, {90, 0, 30}, {1, 200, 1}, {0, 3, 0}});
    // Without vectors these would take a minute.
    if (std::string_view(GetParam()) == "scalar") continue;
    FeedAll(device(), c, {{250, 0, 300}, {1, 700, 1}, {1, 1, 130}, {520, 1, 1}});
  }
}

// Gemma's heads: wide ones, capped scores and windows, in every combination.
TEST_P(PagedAttentionOnEveryLevel, HeadsOfEverySizeWithCapsAndWindowsGiveTheBitsOfOneTensor) {
  // A GPU needs more tokens to take tiles of them, and has its own kernels for every size.
  const bool gpu = device().info().backend == "cuda";
  const int64_t tokens = gpu ? 250 : 20;
  const std::string_view level = GetParam();
  if (level == "scalar" || level == "metal_sim") return;
  for (const auto& [key_dim, value_dim] : {std::pair<int64_t, int64_t>{64, 64},
                                           {64, 128},
                                           {128, 64},
                                           {192, 128},
                                           {256, 256},
                                           {512, 512},
                                           {512, 64},
                                           {80, 400}}) {
    // The CPU has no kernels of its own for wide heads, which would take long.
    if (!gpu && std::max(key_dim, value_dim) > 256) continue;
    for (const DType type : {DType::kBf16, DType::kF8E4M3}) {
      for (const float softcap : {0.0F, 5.0F}) {
        for (const int64_t window : {0, 100}) {
          SCOPED_TRACE(
              fmt::format("{} {} {} {} {}", key_dim, value_dim, DTypeName(type), softcap, window));
          const CacheCase c = {type,   16, 2,     key_dim,     value_dim,
                               window, 1,  false, window == 0, softcap};
          FeedAll(device(), c, {{tokens, 0, 60}, {1, 1, 1}, {5, 70, 0}, {1, 1, 1}});
        }
      }
    }
  }
}

// Latents of 576 features take long without vectors: fewer tokens.
TEST_P(PagedAttentionOnEveryLevel, PagesOfLatentsGiveTheBitsOfOneTensor) {
  for (const CacheCase& c : kLatentCases) {
    if (device().info().backend == "metal") {
      FeedAll(device(), c, {{1, 0, 9}, {1, 1, 1}});
      continue;
    }
    FeedAll(device(), c, {{5, 0, 70}, {1, 1, 1}, {30, 0, 9}, {1, 190, 1}, {0, 3, 0}});
    if (device().info().backend != "cuda") continue;
    // Parts of the keys are merged, tiles have tokens of several positions, and many sequences
    // none.
    FeedAll(device(), c, {{900, 3, 0}, {1, 1, 1}, {2, 0, 1000}, {1, 1, 1}, {4, 5, 6}});
  }
}

// A value that is NaN belongs to the rows that see its key, and to no other: with many rows, some
// blocks of keys are seen by some rows of a tile only.
void ExpectNanInItsRows(const Device& device, DType type, int64_t features) {
  const int32_t tokens = device.info().backend == "metal" ? 130 : 300;
  constexpr int64_t kNanToken = 101;
  constexpr int64_t kHeads = 16;
  constexpr int64_t kKvHeads = 2;
  const int64_t page_tokens =
      CeilDivide(tokens, *CachePageTokens(device)) * *CachePageTokens(device);
  Tensor q(DType::kF32, {tokens, kHeads, features});
  Tensor k(DType::kF32, {tokens, kKvHeads, features});
  Tensor v(DType::kF32, {tokens, kKvHeads, features});
  q.Fill(1, 1.5);
  k.Fill(2);
  std::vector<int32_t> positions(static_cast<size_t>(tokens));
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<int32_t> first_rows = {0, tokens};
  const std::vector<int32_t> table = {0};
  const SequenceRows rows{{positions.data(), DType::kI32, {tokens}},
                          {first_rows.data(), DType::kI32, {2}},
                          {table.data(), DType::kI32, {1, 1}}};
  const int64_t page = 2 * kKvHeads * page_tokens * features;
  std::vector<uint8_t> memory(static_cast<size_t>(page * 2) + 64);
  void* const slab = memory.data();
  const PagedCache cache{{&slab, 1}, 1, page, 0, type, page_tokens, kKvHeads, features, features};
  std::vector<std::vector<double>> results;
  for (const bool poisoned : {false, true}) {
    v.Fill(3);
    if (poisoned) {
      for (const int64_t feature : {int64_t{0}, int64_t{17}, features + 40}) {
        v.Set(kNanToken * kKvHeads * features + feature, std::nanf(""));
      }
    }
    ASSERT_TRUE(AppendToCache(device, k.view(), v.view(), rows, cache).ok());
    Tensor out(DType::kF32, {tokens, kHeads, features});
    ASSERT_TRUE(PagedAttention(device, q.view(), rows, cache, out.view()).ok());
    ASSERT_TRUE(device.Synchronize().ok());
    results.push_back(reference::Elements(out.view()));
  }
  for (size_t at = 0; at < results[1].size(); ++at) {
    const auto row = static_cast<int64_t>(at) / features;
    const int64_t feature = static_cast<int64_t>(at) % features;
    const int64_t token = row / kHeads;
    const bool second = row % kHeads >= kHeads / kKvHeads;
    const bool column = second ? feature == 40 : feature == 0 || feature == 17;
    if (token >= kNanToken && column) {
      ASSERT_TRUE(std::isnan(results[1][at])) << token << " " << feature;
    } else {
      ASSERT_NEAR(results[1][at], results[0][at], 1e-5) << token << " " << feature;
    }
  }
}

TEST_P(PagedAttentionOnEveryLevel, ValuesThatAreNanStayInTheirRows) {
  for (const DType type : {DType::kBf16, DType::kF8E4M3}) {
    SCOPED_TRACE(DTypeName(type));
    ExpectNanInItsRows(device(), type, 64);
    // Wide heads are another kernel of a GPU.
    if (device().info().backend == "cuda") ExpectNanInItsRows(device(), type, 512);
  }
}

/// A cache of one page and one KV head, in the order of its memory, and one sequence.
struct OnePage {
  OnePage(const Device& device, DType type, int64_t key_dim, int64_t value_dim, int64_t tokens)
      : page_tokens(RoundUp(tokens, *CachePageTokens(device))),
        first_rows{0, static_cast<int32_t>(tokens)},
        memory(static_cast<size_t>(page_tokens * (key_dim + value_dim) * DTypeBytes(type)) + 64),
        slab(memory.data()) {
    positions.resize(static_cast<size_t>(tokens));
    std::iota(positions.begin(), positions.end(), 0);
    cache = {{&slab, 1}, 1,        page_tokens * (key_dim + value_dim), 0, type, page_tokens, 1,
             key_dim,    value_dim};
  }
  OnePage(const OnePage&) = delete;
  OnePage& operator=(const OnePage&) = delete;

  SequenceRows rows() const {
    return {{positions.data(), DType::kI32, {static_cast<int64_t>(positions.size())}},
            {first_rows.data(), DType::kI32, {2}},
            {table.data(), DType::kI32, {1, 1}}};
  }
  /// The code of feature `i` of a token's value.
  uint8_t& value(int64_t token, int64_t i) {
    const int64_t at = page_tokens * cache.key_dim + token * cache.value_dim + i;
    return memory[static_cast<size_t>(at)];
  }

  int64_t page_tokens;
  std::vector<int32_t> positions;
  std::vector<int32_t> first_rows;
  std::vector<int32_t> table = {0};
  std::vector<uint8_t> memory;
  void* slab;
  PagedCache cache;
};

// The same for values in the keys, where NaN makes a score NaN, and with it all values of the rows
// that see the key.
TEST_P(PagedAttentionOnEveryLevel, LatentsThatAreNanStayInTheirRows) {
  constexpr int64_t kTokens = 150;
  constexpr int64_t kNanToken = 70;
  constexpr int64_t kHeads = 16;
  constexpr int64_t kFeatures = 96;
  constexpr int64_t kValues = 64;
  for (const DType type : {DType::kBf16, DType::kF8E4M3}) {
    OnePage one(device(), type, kFeatures, 0, kTokens);
    one.cache.value_dim = kValues;
    one.cache.values_in_keys = true;
    Tensor q(DType::kF32, {kTokens, kHeads, kFeatures});
    Tensor k(DType::kF32, {kTokens, 1, kFeatures});
    q.Fill(1, 1.5);
    std::vector<std::vector<double>> results;
    for (const bool poisoned : {false, true}) {
      k.Fill(2);
      if (poisoned) k.Set(kNanToken * kFeatures + 17, std::nanf(""));
      ASSERT_TRUE(AppendToCache(device(), k.view(), {}, one.rows(), one.cache).ok());
      Tensor out(DType::kF32, {kTokens, kHeads, kValues});
      ASSERT_TRUE(PagedAttention(device(), q.view(), one.rows(), one.cache, out.view()).ok());
      ASSERT_TRUE(device().Synchronize().ok());
      results.push_back(reference::Elements(out.view()));
    }
    for (size_t at = 0; at < results[1].size(); ++at) {
      const auto token = static_cast<int64_t>(at) / (kHeads * kValues);
      if (token >= kNanToken) {
        ASSERT_TRUE(std::isnan(results[1][at])) << token;
      } else {
        ASSERT_NEAR(results[1][at], results[0][at], 1e-5) << token;
      }
    }
  }
}

TEST_P(PagedAttentionOnEveryLevel, Fp8CodesAreThoseOfTheFormat) {
  constexpr int64_t kFeatures = 512;
  std::vector<float> numbers;
  // Every bf16 number: every code, every tie between codes, what saturates, infinities, NaN.
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    numbers.push_back(Bf16ToFloat(static_cast<uint16_t>(bits)));
  }
  // The neighbours of ties and of codes in fp32.
  for (int code = 0; code < 255; ++code) {
    const float value = Fp8E4M3ToFloat(static_cast<uint8_t>(code));
    const float tie = (value + Fp8E4M3ToFloat(static_cast<uint8_t>(code + 1))) / 2;
    for (const float x : {value, tie}) {
      numbers.push_back(std::nextafter(x, 1e9F));
      numbers.push_back(std::nextafter(x, -1e9F));
    }
  }
  const int64_t tokens = CeilDivide(static_cast<int64_t>(numbers.size()), kFeatures);
  numbers.resize(static_cast<size_t>(tokens * kFeatures));
  OnePage page(device(), DType::kF8E4M3, 1, kFeatures, tokens);
  std::vector<float> keys(static_cast<size_t>(tokens));
  const Status status =
      AppendToCache(device(), {keys.data(), DType::kF32, {tokens, 1, 1}},
                    {numbers.data(), DType::kF32, {tokens, 1, kFeatures}}, page.rows(), page.cache);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_TRUE(device().Synchronize().ok());
  for (int64_t i = 0; i < tokens * kFeatures; ++i) {
    const float x = numbers[static_cast<size_t>(i)];
    ASSERT_EQ(page.value(i / kFeatures, i % kFeatures), FloatToFp8E4M3(x)) << x;
  }
}

// One key has the weight 1, whatever its score, so that the result is its value.
TEST_P(PagedAttentionOnEveryLevel, Fp8ValuesAreThoseOfTheirCodes) {
  for (const auto& [tokens, value_dim] :
       {std::pair<int64_t, int64_t>{1, 256}, {1, 255}, {32, 256}}) {
    // The first of several tokens sees one key, and is the one that is compared.
    OnePage page(device(), DType::kF8E4M3, 32, value_dim, tokens);
    for (int64_t i = 0; i < value_dim; ++i) page.value(0, i) = static_cast<uint8_t>(i);
    Tensor q(DType::kF32, {tokens, 32, 32});
    q.Fill(1);
    Tensor out(DType::kF32, {tokens, 32, value_dim});
    ASSERT_TRUE(PagedAttention(device(), q.view(), page.rows(), page.cache, out.view()).ok());
    ASSERT_TRUE(device().Synchronize().ok());
    const std::vector<double> values = reference::Elements(out.view());
    for (int64_t i = 0; i < value_dim; ++i) {
      const float want = Fp8E4M3ToFloat(static_cast<uint8_t>(i));
      const auto got = static_cast<float>(values[static_cast<size_t>(i)]);
      EXPECT_TRUE(std::isnan(want) ? std::isnan(got) : got == want) << i << ": " << got;
    }
  }
}

TEST(PagedAttention, ErrorsNameWhatCannotBe) {
  const Device device = *Device::Open("cpu", {.threads = 2});
  Caches caches(device, kCases[0]);
  caches.Feed({2, 3, 300}, 1);
  Tensor q(DType::kF32, {305, 4, 32});
  Tensor k(DType::kF32, {305, 2, 32});
  const auto run = [&](PagedCache cache) {
    Tensor out(DType::kF32, {305, 4, 32});
    const Status attended = PagedAttention(device, q.view(), caches.Rows(), cache, out.view());
    const Status appended = AppendToCache(device, k.view(), k.view(), caches.Rows(), cache);
    EXPECT_EQ(attended.code(), Code::kInvalidArgument);
    EXPECT_EQ(attended.message(), appended.message());
    return attended.message();
  };
  const PagedCache good = caches.cache();
  PagedCache cache = good;
  cache.page_tokens += 1;
  EXPECT_THAT(run(cache), HasSubstr("page_tokens: expected a multiple of 256, got 257"));
  cache = good;
  cache.first_element += 1;
  EXPECT_THAT(run(cache), HasSubstr("do not fit in 8 pages of"));
  cache = good;
  cache.type = DType::kF8E5M2;
  EXPECT_THAT(run(cache), HasSubstr("cache: expected f32, bf16, f16 or f8_e4m3, got f8_e5m2"));
  cache = good;
  cache.slabs = cache.slabs.first(2);
  EXPECT_THAT(run(cache), HasSubstr("block_tables: no page 23 for block 0 of sequence 0"));

  const auto with = [&](std::vector<int32_t>& numbers, size_t at, int32_t number) {
    const int32_t before = std::exchange(numbers[at], number);
    std::string message = run(good);
    numbers[at] = before;
    return message;
  };
  EXPECT_THAT(with(caches.tables(), 5, -1), HasSubstr("no page -1 for block 1 of sequence 2"));
  EXPECT_THAT(with(caches.tables(), 5, 8), HasSubstr("no page 8 for block 1 of sequence 2"));
  EXPECT_THAT(with(caches.positions(), 0, -1), HasSubstr("positions: expected 0 or more, got -1"));
  EXPECT_THAT(with(caches.positions(), 3, 7), HasSubstr("positions: expected 1, got 7 at 3"));
  EXPECT_THAT(with(caches.positions(), 304, 512), HasSubstr("positions: expected 299, got 512"));
  EXPECT_THAT(with(caches.first_rows(), 1, 6),
              HasSubstr("first_rows: expected to ascend from 0 to 305, got 5 at 2"));
  EXPECT_THAT(with(caches.first_rows(), 3, 304),
              HasSubstr("first_rows: expected to ascend from 0 to 305, got 304 at 3"));
  EXPECT_THAT(PagedAttention(device, q.view(), caches.Rows(), good,
                             {good.slabs[0], DType::kF32, {305, 4, 32}})
                  .message(),
              HasSubstr("out: overlaps the cache"));
}

}  // namespace
}  // namespace marlin::paged_attention_test
