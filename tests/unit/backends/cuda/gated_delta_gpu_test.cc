// The gated delta rule on a GPU: against its reference where chunks end, and the promises of
// kBatchInvariant.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "gpu_fixture.h"
#include "marlin/recurrent.h"
#include "reference/gated_delta.h"

namespace marlin {
namespace {

/// Rows of sequences. A page of a sequence's state before it (-1: zeros) is `from`.
struct DeltaRows {
  std::vector<int32_t> counts;
  std::vector<int32_t> from;
  std::vector<int32_t> to;
};

constexpr int64_t kPages = 12;
constexpr int64_t kFirstElement = 32;

class GatedDeltaGpu : public GpuTest<::testing::Test> {
 protected:
  /// Outputs of all rows of a call, and all pages after it.
  struct Outcome {
    std::vector<float> out;
    std::vector<float> pages;
  };

  void SetSizes(const GatedDeltaSizes& sizes) {
    sizes_ = sizes;
    conv_ = Scaled(sizes.channels() * sizes.conv_width, 2, 0.5F, 0.0F);
    log_decay_ = Scaled(sizes.value_heads, 3, 0.7F, -1.0F);
    decay_bias_ = Scaled(sizes.value_heads, 4, 1.0F, -1.0F);
    norm_ = Scaled(sizes.value_dim, 5, 1.0F, 0.0F);
    pages_ = Scaled(kPages * PageStride(), 6, 0.3F, 0.0F);
  }

  int64_t PageStride() const { return sizes_.state_elements() + kFirstElement + 32; }
  int64_t RowStride() const {
    const int64_t group = sizes_.value_heads / sizes_.key_heads;
    return sizes_.key_heads * (2 * sizes_.key_dim + 2 * group * (sizes_.value_dim + 1)) + 8;
  }

  static std::vector<float> Scaled(int64_t count, uint32_t seed, float scale, float offset) {
    std::vector<float> values = GaussianFloats(count, seed);
    for (float& value : values) value = value * scale + offset;
    return values;
  }

  /// The parts of projected rows at `data`.
  GatedDeltaInputs InputsAt(const float* data, int64_t rows) const {
    const int64_t heads = sizes_.key_heads;
    const int64_t group = sizes_.value_heads / heads;
    const auto part = [&](int64_t features) {
      TensorView view(data, DType::kF32, {rows, heads, features});
      view.set_stride(0, RowStride());
      data += heads * features;
      return view;
    };
    const TensorView queries = part(sizes_.key_dim);
    const TensorView keys = part(sizes_.key_dim);
    const TensorView values = part(group * sizes_.value_dim);
    const TensorView gates = part(group * sizes_.value_dim);
    const TensorView writes = part(group);
    return {queries, keys, values, gates, writes, part(group)};
  }
  GatedDeltaWeights WeightsAt(const float* conv, const float* log_decay, const float* decay_bias,
                              const float* norm) const {
    const int64_t heads = sizes_.value_heads;
    return {{conv, DType::kF32, {sizes_.channels(), sizes_.conv_width}},
            {log_decay, DType::kF32, {heads}},
            {decay_bias, DType::kF32, {heads}},
            {norm, DType::kF32, {sizes_.value_dim}},
            1e-6F,
            sizes_};
  }

  /// Runs rows of `inputs` (a row has RowStride elements) with the pages of this fixture.
  Outcome Run(const std::vector<float>& inputs, const DeltaRows& rows,
              Determinism determinism) const {
    std::vector<int32_t> first_rows = {0};
    std::vector<int32_t> positions;
    std::vector<int32_t> pages;
    for (size_t s = 0; s < rows.counts.size(); ++s) {
      first_rows.push_back(first_rows.back() + rows.counts[s]);
      for (int32_t i = 0; i < rows.counts[s]; ++i) positions.push_back(i);
      pages.insert(pages.end(), {rows.from[s], rows.to[s]});
    }
    const int64_t count = first_rows.back();
    const auto sequences = static_cast<int64_t>(rows.counts.size());
    const DeviceBuffer on_device[] = {Upload(inputs),      Upload(conv_), Upload(log_decay_),
                                      Upload(decay_bias_), Upload(norm_), Upload(positions),
                                      Upload(first_rows),  Upload(pages), Upload(pages_)};
    const auto floats = [&](size_t i) { return static_cast<const float*>(on_device[i].data()); };
    const DeviceBuffer out = Make(count * sizes_.value_heads * sizes_.value_dim * 4);
    void* const slab = on_device[8].data();
    const RecurrentRows where = {{on_device[5].data(), DType::kI32, {count}},
                                 {on_device[6].data(), DType::kI32, {sequences + 1}},
                                 {on_device[7].data(), DType::kI32, {sequences, 2}}};
    const Status status = GatedDelta(
        device(), InputsAt(floats(0), count), WeightsAt(floats(1), floats(2), floats(3), floats(4)),
        where, {{&slab, 1}, kPages, PageStride(), kFirstElement},
        {out.data(), DType::kF32, {count, sizes_.value_heads, sizes_.value_dim}}, determinism);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(device().Synchronize().ok());
    return {Download<float>(out), Download<float>(on_device[8])};
  }

  std::vector<double> State(const std::vector<float>& pages, int32_t page) const {
    std::vector<double> state(static_cast<size_t>(sizes_.state_elements()));
    if (page < 0) return state;
    const auto first = pages.begin() + page * PageStride() + kFirstElement;
    std::copy_n(first, state.size(), state.begin());
    return state;
  }

  /// |got - want| / |want| of a range.
  static double Distance(const std::vector<double>& got, const std::vector<double>& want,
                         size_t first, size_t count) {
    double error = 0;
    double size = 1e-30;
    for (size_t i = first; i < first + count; ++i) {
      error += (got[i] - want[i]) * (got[i] - want[i]);
      size += want[i] * want[i];
    }
    return std::sqrt(error / size);
  }

  /// Checks the outputs and the state of every sequence.
  void ExpectReference(const std::vector<float>& inputs, const DeltaRows& rows,
                       Determinism determinism, double out_error, double state_error) const {
    const Outcome outcome = Run(inputs, rows, determinism);
    const std::vector<double> out(outcome.out.begin(), outcome.out.end());
    const GatedDeltaWeights weights =
        WeightsAt(conv_.data(), log_decay_.data(), decay_bias_.data(), norm_.data());
    const auto width = static_cast<size_t>(sizes_.value_dim);
    const auto heads = static_cast<size_t>(sizes_.value_heads);
    int64_t row = 0;
    for (size_t s = 0; s < rows.counts.size(); ++s) {
      std::vector<int64_t> own;
      for (int32_t i = 0; i < rows.counts[s]; ++i) own.push_back(row++);
      std::vector<double> state = State(pages_, rows.from[s]);
      const std::vector<double> want = reference::GatedDelta(
          InputsAt(inputs.data(), static_cast<int64_t>(out.size() / (heads * width))), weights,
          sizes_, own, &state);
      const std::vector<double> got(
          out.begin() +
              static_cast<std::ptrdiff_t>(static_cast<size_t>(row) * heads * width - want.size()),
          out.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(row) * heads * width));
      EXPECT_LE(Distance(got, want, 0, want.size()), out_error)
          << rows.counts[s] << " rows, sequence " << s;
      const std::vector<double> after = State(outcome.pages, rows.to[s]);
      const auto kept = static_cast<size_t>((sizes_.conv_width - 1) * sizes_.channels());
      EXPECT_EQ(Distance(after, state, 0, kept), 0) << "kept inputs, sequence " << s;
      const auto first = static_cast<size_t>(sizes_.conv_elements());
      const double distance = Distance(after, state, first, state.size() - first);
      EXPECT_LE(distance, state_error) << rows.counts[s] << " rows, sequence " << s;
    }
  }

  GatedDeltaSizes sizes_;
  std::vector<float> conv_, log_decay_, decay_bias_, norm_, pages_;
};

/// The layer of Qwen3.6-35B-A3B, with a part of its heads, and others.
constexpr GatedDeltaSizes kQwen = {2, 4, 128, 128, 4};
constexpr GatedDeltaSizes kSmall = {2, 6, 64, 64, 4};
constexpr GatedDeltaSizes kOdd = {1, 2, 40, 24, 3};
constexpr GatedDeltaSizes kWide = {1, 1, 192, 256, 4};
constexpr GatedDeltaSizes kBroad = {1, 2, 128, 256, 4};

const DeltaRows kBorders = {
    {1, 2, 63, 64, 65, 130, 300}, {-1, 0, 1, -1, 2, 3, 4}, {5, 6, 1, 7, 2, 8, 9}};

TEST_F(GatedDeltaGpu, IsItsReferenceWhereChunksEnd) {
  for (const GatedDeltaSizes& sizes : {kQwen, kSmall, kOdd, kWide, kBroad}) {
    SCOPED_TRACE(fmt::format("{} x {}", sizes.key_dim, sizes.value_dim));
    SetSizes(sizes);
    const std::vector<float> inputs = GaussianFloats(625 * RowStride(), 11);
    ExpectReference(inputs, kBorders, Determinism::kBatchInvariant, 1e-5, 5e-6);
    // Operands of matrix units have 11 significant bits.
    ExpectReference(inputs, kBorders, Determinism::kDefault, 2e-3, 1e-3);
  }
}

TEST_F(GatedDeltaGpu, LongSequencesAreTheirReference) {
  SetSizes({1, 2, 128, 64, 4});
  const DeltaRows rows = {{5, 2200, 40, 1}, {0, 1, -1, 3}, {0, 1, 2, 3}};
  const std::vector<float> inputs = GaussianFloats(2246 * RowStride(), 15);
  ExpectReference(inputs, rows, Determinism::kDefault, 2e-3, 1e-3);
}

TEST_F(GatedDeltaGpu, SequencesOfOneRowAreExact) {
  SetSizes({4, 8, 128, 128, 4});
  const DeltaRows rows = {{1, 1, 1, 1}, {0, -1, 1, 2}, {0, 3, 4, 2}};
  const std::vector<float> inputs = GaussianFloats(4 * RowStride(), 12);
  ExpectReference(inputs, rows, Determinism::kDefault, 1e-5, 5e-6);
}

TEST_F(GatedDeltaGpu, BatchInvariantRowsHaveTheSameBits) {
  for (const GatedDeltaSizes& sizes : {kQwen, kOdd, kWide}) {
    SetSizes(sizes);
    constexpr int32_t kRows = 150;
    const std::vector<float> inputs = GaussianFloats(kRows * RowStride(), 13);
    const Outcome whole = Run(inputs, {{kRows}, {3}, {3}}, Determinism::kBatchInvariant);
    const std::vector<float> before = pages_;
    for (const std::vector<int32_t>& parts :
         {std::vector<int32_t>{64, 1, 1, 84}, {1, 149}, {17, 100, 33}}) {
      pages_ = before;
      std::vector<float> out;
      int32_t first = 0;
      for (const int32_t count : parts) {
        // Another sequence's rows come first.
        const auto begin = inputs.begin() + first * RowStride();
        std::vector<float> rows(inputs.begin(), inputs.begin() + 2 * RowStride());
        rows.insert(rows.end(), begin, begin + count * RowStride());
        const Outcome part = Run(rows, {{2, count}, {-1, 3}, {7, 3}}, Determinism::kBatchInvariant);
        out.insert(out.end(), part.out.begin() + 2 * sizes.value_heads * sizes.value_dim,
                   part.out.end());
        pages_ = part.pages;
        first += count;
      }
      EXPECT_EQ(out, whole.out) << parts[0];
      EXPECT_EQ(State(pages_, 3), State(whole.pages, 3)) << parts[0];
    }
  }
}

TEST_F(GatedDeltaGpu, RepeatsHaveTheSameBits) {
  SetSizes(kQwen);
  const std::vector<float> inputs = GaussianFloats(625 * RowStride(), 14);
  const Outcome first = Run(inputs, kBorders, Determinism::kDefault);
  const Outcome second = Run(inputs, kBorders, Determinism::kDefault);
  EXPECT_EQ(first.out, second.out);
  EXPECT_EQ(first.pages, second.pages);
}

}  // namespace
}  // namespace marlin
