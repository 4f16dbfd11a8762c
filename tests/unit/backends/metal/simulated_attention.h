// Attention calls for the simulator: sequences in a paged cache and as tensors, with their
// reference.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "backends/metal/metal_backend.h"
#include "backends/metal/runtime/simulated_driver.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/scalars.h"
#include "marlin/decoder.h"
#include "plan/step/decoder_backend.h"
#include "plan/step/decoder_calls.h"
#include "reference/decoder.h"
#include "reference/elements.h"

namespace marlin::metal {

/// A sequence of a call: its last `tokens` of `length` positions are rows.
struct SequenceSize {
  int64_t tokens = 1;
  int64_t length = 1;
};

struct AttentionSizes {
  DType type = DType::kBf16;
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t key_dim = 64;
  int64_t value_dim = 64;
  std::vector<SequenceSize> sequences = {{}};
  int64_t page_tokens = 64;
  int64_t window = 0;
  bool chunked = false;
  bool sinks = false;
  float softcap = 0.0F;
  bool values_in_keys = false;
  DType io = DType::kF32;  ///< The type of queries and results.
};

/// Elements of one type with the numbers that they round to.
class Numbers {
 public:
  Numbers(DType type, int64_t count) : type_(type), bytes_(static_cast<size_t>(count * 4), 0xff) {}
  void Set(int64_t at, float value) {
    const auto i = static_cast<size_t>(at);
    if (type_ == DType::kF32) reinterpret_cast<float*>(bytes_.data())[i] = value;
    if (type_ == DType::kBf16) Halves()[i] = FloatToBf16(value);
    if (type_ == DType::kF16) Halves()[i] = FloatToHalf(value);
    if (type_ == DType::kF8E4M3) bytes_[i] = FloatToFp8E4M3(value);
  }
  float Get(int64_t at) const {
    const auto i = static_cast<size_t>(at);
    const auto* const halves = reinterpret_cast<const uint16_t*>(bytes_.data());
    if (type_ == DType::kBf16) return Bf16ToFloat(halves[i]);
    if (type_ == DType::kF16) return HalfToFloat(halves[i]);
    if (type_ == DType::kF8E4M3) return Fp8E4M3ToFloat(bytes_[i]);
    return reinterpret_cast<const float*>(bytes_.data())[i];
  }
  void* data() { return bytes_.data(); }
  DType type() const { return type_; }

 private:
  uint16_t* Halves() { return reinterpret_cast<uint16_t*>(bytes_.data()); }

  DType type_;
  std::vector<uint8_t> bytes_;
};

/// The operands of a call, filled with random numbers. Pages that no row sees are not in the table,
/// and what no position wrote is NaN.
class PagedProblem {
 public:
  explicit PagedProblem(const AttentionSizes& sizes, unsigned seed = 1)
      : sizes_(sizes),
        random_(seed),
        queries_(sizes.io, Rows() * sizes.heads * sizes.key_dim),
        out_(sizes.io, Rows() * sizes.heads * sizes.value_dim),
        cache_(sizes.type, 2 * SlabPages() * PageElements()),
        sinks_(static_cast<size_t>(sizes.heads), 0.4F) {
    std::normal_distribution<float> normal(0.0F, 1.0F);
    for (int64_t i = 0; i < Rows() * sizes.heads * sizes.key_dim; ++i) {
      queries_.Set(i, normal(random_));
    }
    first_rows_ = {0};
    blocks_ = 1;
    for (const SequenceSize& s : sizes.sequences) {
      blocks_ = std::max(blocks_, CeilDivide(s.length, sizes.page_tokens));
    }
    // From the last page down, so that the pages of a sequence are in no order.
    int32_t next_page = static_cast<int32_t>(2 * SlabPages()) - 1;
    for (const SequenceSize& s : sizes.sequences) {
      for (int64_t i = s.length - s.tokens; i < s.length; ++i) {
        positions_.push_back(static_cast<int32_t>(i));
      }
      first_rows_.push_back(static_cast<int32_t>(positions_.size()));
      std::vector<int32_t> table(static_cast<size_t>(blocks_), -7);
      const int64_t seen =
          sizes.window > 0 ? std::max<int64_t>(s.length - s.tokens - sizes.window + 1, 0) : 0;
      for (int64_t b = seen / sizes.page_tokens; b * sizes.page_tokens < s.length; ++b) {
        table[static_cast<size_t>(b)] = next_page--;
      }
      tables_.insert(tables_.end(), table.begin(), table.end());
    }
    for (int64_t s = 0; s < std::ssize(sizes.sequences); ++s) FillSequence(s, &normal);
    slabs_ = {cache_.data(), Byte(cache_, SlabPages() * PageElements())};
  }

  int64_t Rows() const {
    int64_t rows = 0;
    for (const SequenceSize& s : sizes_.sequences) rows += s.tokens;
    return rows;
  }
  SequenceRows rows() const {
    return {{positions_.data(), DType::kI32, {Rows()}},
            {first_rows_.data(), DType::kI32, {std::ssize(first_rows_)}},
            {tables_.data(), DType::kI32, {std::ssize(sizes_.sequences), blocks_}}};
  }
  PagedCache cache() const {
    return {slabs_,           SlabPages(),          PageElements(),  FirstElement(),
            sizes_.type,      sizes_.page_tokens,   sizes_.kv_heads, sizes_.key_dim,
            sizes_.value_dim, sizes_.values_in_keys};
  }
  AttentionOptions options() const {
    AttentionOptions options;
    options.window = sizes_.window;
    options.chunked = sizes_.chunked;
    options.softcap = sizes_.softcap;
    if (sizes_.sinks) options.sinks = {sinks_.data(), DType::kF32, {sizes_.heads}};
    return options;
  }
  MutableTensorView queries() {
    return {queries_.data(), sizes_.io, {Rows(), sizes_.heads, sizes_.key_dim}};
  }
  MutableTensorView out() {
    return {out_.data(), sizes_.io, {Rows(), sizes_.heads, sizes_.value_dim}};
  }

  /// Key or value `feature` of a position, or the place where it is.
  float Key(int64_t sequence, int64_t position, int64_t head, int64_t feature) const {
    return cache_.Get(KeyAt(sequence, position, head) + feature);
  }
  float Value(int64_t sequence, int64_t position, int64_t head, int64_t feature) const {
    return cache_.Get(ValueAt(sequence, position, head) + feature);
  }
  void SetValue(int64_t sequence, int64_t position, int64_t head, int64_t feature, float value) {
    cache_.Set(ValueAt(sequence, position, head) + feature, value);
  }
  void SetKey(int64_t sequence, int64_t position, int64_t head, int64_t feature, float value) {
    cache_.Set(KeyAt(sequence, position, head) + feature, value);
  }

  std::vector<double> Results() { return reference::Elements(out()); }

  /// The keys and values of a sequence as f32 tensors; positions that no row sees are 0.
  struct Tensors {
    std::vector<float> keys, values;
    AttentionInput input;
  };
  Tensors TensorsOf(int64_t s) {
    const SequenceSize& size = sizes_.sequences[static_cast<size_t>(s)];
    Tensors made;
    for (int64_t at = 0; at < size.length; ++at) {
      const bool seen = Page(s, at) >= 0;
      for (int64_t head = 0; head < sizes_.kv_heads; ++head) {
        for (int64_t i = 0; i < sizes_.key_dim; ++i) {
          made.keys.push_back(seen ? Key(s, at, head, i) : 0.0F);
        }
        for (int64_t i = 0; i < sizes_.value_dim; ++i) {
          made.values.push_back(seen ? Value(s, at, head, i) : 0.0F);
        }
      }
    }
    const auto part = [&](const MutableTensorView& view) {
      auto* const data = static_cast<uint8_t*>(view.data()) + first_rows_[static_cast<size_t>(s)] *
                                                                  view.stride(0) *
                                                                  DTypeBytes(view.dtype());
      return MutableTensorView(data, view.dtype(), {size.tokens, view.dim(1), view.dim(2)});
    };
    made.input = {
        part(queries()),
        {made.keys.data(), DType::kF32, {size.length, sizes_.kv_heads, sizes_.key_dim}},
        {made.values.data(), DType::kF32, {size.length, sizes_.kv_heads, sizes_.value_dim}},
        part(out())};
    return made;
  }

  /// The expected results, in double.
  std::vector<double> Reference() {
    std::vector<double> all;
    for (int64_t s = 0; s < std::ssize(sizes_.sequences); ++s) {
      if (sizes_.sequences[static_cast<size_t>(s)].tokens == 0) continue;
      const Tensors tensors = TensorsOf(s);
      const std::vector<double> part = reference::Attention(tensors.input, options());
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }

  std::vector<int32_t>& positions() { return positions_; }
  std::vector<int32_t>& first_rows() { return first_rows_; }
  std::vector<int32_t>& tables() { return tables_; }
  const AttentionSizes& sizes() const { return sizes_; }

 private:
  static void* Byte(Numbers& numbers, int64_t element) {
    return static_cast<uint8_t*>(numbers.data()) + element * DTypeBytes(numbers.type());
  }
  /// Pages of each of two slabs.
  int64_t SlabPages() const {
    int64_t pages = 0;
    for (const SequenceSize& s : sizes_.sequences)
      pages += CeilDivide(s.length, sizes_.page_tokens);
    return pages / 2 + 1;
  }
  int64_t PartElements() const {
    return sizes_.kv_heads * sizes_.page_tokens *
           (sizes_.key_dim + (sizes_.values_in_keys ? 0 : sizes_.value_dim));
  }
  /// A page holds two layers; this one is the second.
  int64_t FirstElement() const { return RoundUp(PartElements(), int64_t{32}); }
  int64_t PageElements() const { return 2 * FirstElement(); }
  int32_t Page(int64_t sequence, int64_t position) const {
    return tables_[static_cast<size_t>(sequence * blocks_ + position / sizes_.page_tokens)];
  }
  int64_t KeyAt(int64_t sequence, int64_t position, int64_t head) const {
    const int64_t place = head * sizes_.page_tokens + position % sizes_.page_tokens;
    return Page(sequence, position) * PageElements() + FirstElement() + place * sizes_.key_dim;
  }
  int64_t ValueAt(int64_t sequence, int64_t position, int64_t head) const {
    if (sizes_.values_in_keys) return KeyAt(sequence, position, head);
    const int64_t place = head * sizes_.page_tokens + position % sizes_.page_tokens;
    return Page(sequence, position) * PageElements() + FirstElement() +
           sizes_.kv_heads * sizes_.page_tokens * sizes_.key_dim + place * sizes_.value_dim;
  }
  void FillSequence(int64_t s, std::normal_distribution<float>* normal) {
    for (int64_t at = 0; at < sizes_.sequences[static_cast<size_t>(s)].length; ++at) {
      if (Page(s, at) < 0) continue;
      for (int64_t head = 0; head < sizes_.kv_heads; ++head) {
        for (int64_t i = 0; i < sizes_.key_dim; ++i) SetKey(s, at, head, i, (*normal)(random_));
        if (sizes_.values_in_keys) continue;
        for (int64_t i = 0; i < sizes_.value_dim; ++i) {
          SetValue(s, at, head, i, (*normal)(random_));
        }
      }
    }
  }

  AttentionSizes sizes_;
  std::mt19937 random_;
  Numbers queries_;
  Numbers out_;
  Numbers cache_;
  std::vector<float> sinks_;
  std::vector<int32_t> positions_;
  std::vector<int32_t> first_rows_;
  std::vector<int32_t> tables_;
  int64_t blocks_ = 0;
  std::vector<void*> slabs_;
};

/// The device's decoder, without a host behind it, and what it launched.
class SimulatedDecoder {
 public:
  Status Open() {
    auto driver = OpenSimulatedDriver(&launches_);
    if (!driver.ok()) return driver.status();
    driver_ = driver->get();
    backend_ = MakeMetalBackend(std::move(*driver));
    return {};
  }

  /// Runs a call that the kernels must take.
  template <typename Call>
  Status Run(const Call& call) {
    const DecoderBackend& decoder = *backend_->decoder();
    launches_.clear();
    EXPECT_TRUE(decoder.Takes(call));
    const int64_t bytes = decoder.WorkspaceBytes(call);
    std::vector<uint8_t> memory(static_cast<size_t>(bytes) + 64, 0xff);
    auto* const aligned =
        reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63});
    const Status status = decoder.Run(call, {nullptr, aligned});
    return status.ok() ? backend_->Synchronize(nullptr) : status;
  }
  Status Run(PagedProblem& problem, const AttentionOptions& options) {
    const SequenceRows rows = problem.rows();
    const PagedCache cache = problem.cache();
    return Run(PagedAttentionCall{problem.queries(), rows, cache, problem.out(), options});
  }
  Status Run(PagedProblem& problem) { return Run(problem, problem.options()); }

  const std::vector<SimulatedLaunch>& launches() const { return launches_; }
  std::vector<std::string> Functions() const {
    std::vector<std::string> names;
    for (const SimulatedLaunch& launch : launches_) names.push_back(launch.function);
    return names;
  }
  const DecoderBackend& decoder() const { return *backend_->decoder(); }
  /// Fast math promises nothing of NaN.
  bool fast_math() const { return driver_->Shape().fast_math; }

 private:
  std::vector<SimulatedLaunch> launches_;
  Driver* driver_ = nullptr;
  std::unique_ptr<Backend> backend_;
};

/// Opens the decoder once for the tests of a suite.
class SimulatedDecoderTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { opened_ = decoder_.Open(); }
  void SetUp() override {
    if (!opened_.ok()) GTEST_SKIP() << opened_.message();
  }

  static void ExpectClose(const std::vector<double>& got, const std::vector<double>& want,
                          double bound, const std::string& what) {
    ASSERT_EQ(got.size(), want.size()) << what;
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_NEAR(got[i], want[i], bound * std::max(1.0, std::abs(want[i]))) << what << " at " << i;
    }
  }

  inline static Status opened_;
  inline static SimulatedDecoder decoder_;
};

}  // namespace marlin::metal
