// Products, lookups and dequantization of weights that permute, scale or rotate the columns of A,
// on every device and at every level of the CPU that is there: the bits of the stored weights for
// transformed activations, and the sums of the double-precision reference on data whose sums are
// exact.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "../test_device.h"
#include "base/scalars.h"
#include "layout/weights_buffer.h"
#include "marlin/decoder.h"
#include "marlin/gemm.h"
#include "marlin/moe.h"
#include "marlin/quantize.h"
#include "ops/gemm/prepare_columns.h"
#include "reference/dequantize.h"

namespace marlin::transformed_gemm_test {
namespace {

/// A change that weights make to the columns of A.
struct Transform {
  bool permutation = true;
  bool scale = false;
  int64_t hadamard = 0;
};

/// Weights with random codes, and scales and input scales that are powers of two, whose products
/// with small integers have exact sums; Hadamard blocks of 4, 16 and 64 keep them exact.
QuantizedWeights Lattice(Format format, int64_t experts, int64_t k, int64_t n, uint32_t seed,
                         const Transform& transform = {}) {
  std::mt19937 random(seed);
  const bool zeros = GetFormatInfo(format).zero_point == ZeroPoint::kRequired;
  auto buffer = AllocateWeights({.format = format,
                                 .experts = experts,
                                 .k = k,
                                 .n = n,
                                 .group_size = 32,
                                 .has_zeros = zeros,
                                 .has_permutation = transform.permutation,
                                 .has_input_scale = transform.scale,
                                 .input_hadamard = transform.hadamard});
  EXPECT_TRUE(buffer.ok()) << buffer.status().message();
  const QuantizedWeights& weights = buffer->weights;
  auto* const codes = static_cast<uint32_t*>(buffer->codes);
  for (int64_t i = 0; i < weights.codes.ElementCount(); ++i) {
    codes[i] = static_cast<uint32_t>(random());
  }
  for (int64_t i = 0; i < weights.scales.ElementCount(); ++i) {
    static_cast<uint16_t*>(buffer->scales)[i] =
        static_cast<uint16_t>(0x3800 + 0x400 * static_cast<int>(random() % 3));
    if (zeros) {
      static_cast<uint16_t*>(buffer->zeros)[i] = FloatToHalf(static_cast<float>(random() % 16));
    }
  }
  for (int64_t i = 0; transform.scale && i < experts * k; ++i) {
    constexpr float kScales[] = {1.0F, -0.5F, 2.0F};
    buffer->input_scale[i] = kScales[random() % 3];
  }
  for (int64_t e = 0; e < experts && transform.permutation; ++e) {
    int32_t* const order = buffer->permutation + e * k;
    std::iota(order, order + k, 0);
    std::shuffle(order, order + k, random);
  }
  return weights;
}

/// The same stored rows without their transform.
QuantizedWeights Sorted(QuantizedWeights weights) {
  weights.spec.has_permutation = false;
  weights.permutation = TensorView();
  weights.spec.has_input_scale = false;
  weights.input_scale = TensorView();
  weights.spec.input_hadamard = 0;
  return weights;
}

/// Rows of small integers, `stride` elements apart.
struct Rows {
  Rows(DType type, int64_t rows, int64_t columns, int64_t row_stride, uint32_t seed)
      : dtype(type), m(rows), k(columns), stride(row_stride) {
    std::mt19937 random(seed);
    bytes.resize(static_cast<size_t>(m * stride * DTypeBytes(dtype)) + 64);
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t i = 0; i < k; ++i) {
        Set(row * stride + i, static_cast<float>(random() % 5) - 2.0F);
      }
    }
  }
  void Set(int64_t at, float value) {
    if (dtype == DType::kF32) {
      std::memcpy(bytes.data() + at * 4, &value, 4);
      return;
    }
    const uint16_t half = dtype == DType::kBf16 ? FloatToBf16(value) : FloatToHalf(value);
    std::memcpy(bytes.data() + at * 2, &half, 2);
  }
  float At(int64_t row, int64_t i) const {
    const uint8_t* const from = bytes.data() + (row * stride + i) * DTypeBytes(dtype);
    float value = 0;
    if (dtype == DType::kF32) {
      std::memcpy(&value, from, 4);
      return value;
    }
    uint16_t half = 0;
    std::memcpy(&half, from, 2);
    return dtype == DType::kBf16 ? Bf16ToFloat(half) : HalfToFloat(half);
  }
  TensorView view() const { return {bytes.data(), dtype, {m, k}, {stride, 1}}; }

  /// The columns in the order of stored rows, in aligned rows.
  Rows Gathered(const int32_t* order) const {
    Rows sorted(dtype, m, k, (k + 15) / 16 * 16, 0);
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t i = 0; i < k; ++i) sorted.Set(row * sorted.stride + i, At(row, order[i]));
    }
    return sorted;
  }

  /// The rows as weights without a permutation read them: scaled, rotated, rounded once.
  Rows Rotated(const QuantizedWeights& weights) const {
    Rows rotated(dtype, m, k, (k + 15) / 16 * 16, 0);
    const int64_t size = std::max<int64_t>(weights.spec.input_hadamard, 1);
    const float* const scale = weights.input_scale.As<float>();
    const double norm = 1 / std::sqrt(static_cast<double>(size));
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t i = 0; i < k; ++i) {
        double sum = 0;
        for (int64_t j = i / size * size; j < (i / size + 1) * size; ++j) {
          const int parity = std::popcount(static_cast<uint64_t>(i % size & j % size)) % 2;
          const double value = At(row, j) * (scale == nullptr ? 1.0 : scale[j]);
          sum += parity == 0 ? value : -value;
        }
        rotated.Set(row * rotated.stride + i, static_cast<float>(sum * norm));
      }
    }
    return rotated;
  }

  DType dtype;
  int64_t m;
  int64_t k;
  int64_t stride;
  std::vector<uint8_t> bytes;
};

const int32_t* OrderOf(const QuantizedWeights& weights, int64_t expert = 0) {
  return weights.permutation.As<int32_t>() + expert * weights.spec.k;
}

std::vector<float> Product(const Device& device, const TensorView& a,
                           const PreparedWeights& weights, const GemmOptions& options = {}) {
  const int64_t n = options.gated ? weights.spec().n / 2 : weights.spec().n;
  std::vector<float> out(static_cast<size_t>(a.dim(0) * n), -7.0F);
  const Status status =
      Gemm(device, a, weights, MutableTensorView(out.data(), DType::kF32, {a.dim(0), n}), options);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(device.Synchronize().ok());
  return out;
}

std::vector<float> Expected(const QuantizedWeights& weights, const Rows& a, int64_t expert = 0) {
  const WeightsSpec& spec = weights.spec;
  const auto dense = reference::Dequantize(weights, expert);
  EXPECT_TRUE(dense.ok()) << dense.status().message();
  std::vector<float> out;
  for (int64_t row = 0; row < a.m; ++row) {
    for (int64_t n = 0; n < spec.n; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < spec.k; ++k) {
        sum +=
            static_cast<double>(a.At(row, k)) * dense->value[static_cast<size_t>(k * spec.n + n)];
      }
      out.push_back(static_cast<float>(sum));
    }
  }
  return out;
}

std::vector<const char*> Devices() {
  if (OnOtherDevice()) return {TestDevice()};
  return {"cpu", "scalar", "avx2", "avx512", "amx", "neon", "metal-sim"};
}

/// A device by its name, or the CPU at a level.
class TransformedGemm : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string name = GetParam();
    const bool level = name != "cpu" && name != "cuda" && name != "metal-sim";
    if (level) {
      ASSERT_EQ(setenv("MARLIN_CPU", name.c_str(), 1), 0);
    }
    auto opened = Device::Open(level ? "cpu" : name, {.threads = 2});
    if (level) unsetenv("MARLIN_CPU");
    if (opened.status().code() == Code::kUnsupported) GTEST_SKIP() << opened.status().message();
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    device_.emplace(*std::move(opened));
  }
  bool simulated() const { return std::string(GetParam()) == "metal-sim"; }
  std::optional<Device> device_;
};

/// Compares the product of rows that begin at odd places with that of sorted weights, and with the
/// reference.
void ExpectSortedBits(const Device& device, Format format, DType type, int64_t m, int64_t k) {
  const QuantizedWeights weights = Lattice(format, 1, k, 40, 5);
  const auto prepared = Prepare(weights, device);
  const auto sorted = Prepare(Sorted(weights), device);
  ASSERT_TRUE(prepared.ok() && sorted.ok()) << prepared.status().message();
  EXPECT_EQ(prepared->spec(), weights.spec);
  EXPECT_EQ(prepared->bytes(), sorted->bytes() + 4 * k);
  const Rows a(type, m, k, k + 3, 9);
  const std::vector<float> product = Product(device, a.view(), *prepared);
  EXPECT_EQ(product, Expected(weights, a));
  const Rows gathered = a.Gathered(OrderOf(weights));
  EXPECT_EQ(product, Product(device, gathered.view(), *sorted));
}

TEST_P(TransformedGemm, HasTheBitsOfSortedWeightsAndTheReferencesSums) {
  constexpr std::pair<int64_t, int64_t> kSizes[] = {{1, 64},  {2, 64},  {7, 64},  {33, 64},
                                                    {1, 150}, {2, 150}, {7, 150}, {33, 150}};
  for (const Format format : {Format::kS4, Format::kU4, Format::kS8, Format::kU8, Format::kInt3,
                              Format::kInt2, Format::kFp4E2M1}) {
    for (const DType type : {DType::kF32, DType::kBf16, DType::kF16}) {
      for (const auto& [m, k] : kSizes) {
        if (simulated() && (m == 33 || (type == DType::kF16 && k == 64))) continue;
        SCOPED_TRACE(std::string(FormatName(format)) + " " + std::string(DTypeName(type)) + " m " +
                     std::to_string(m) + " k " + std::to_string(k));
        ExpectSortedBits(*device_, format, type, m, k);
      }
    }
  }
}

TEST_P(TransformedGemm, EpiloguesAndPlansAreThoseOfSortedWeights) {
  const QuantizedWeights weights = Lattice(Format::kU4, 1, 96, 48, 3);
  const auto prepared = Prepare(weights, *device_);
  const auto sorted = Prepare(Sorted(weights), *device_);
  ASSERT_TRUE(prepared.ok() && sorted.ok());
  std::vector<float> bias(48);
  std::iota(bias.begin(), bias.end(), -20.0F);
  const std::vector<float> row_weight = {0.5F, 2.0F, -1.0F};
  const Rows a(DType::kF32, 3, 96, 96, 4);
  const Rows gathered = a.Gathered(OrderOf(weights));
  for (const bool gated : {false, true}) {
    for (const Determinism determinism : {Determinism::kDefault, Determinism::kBatchInvariant}) {
      GemmOptions options;
      options.bias = TensorView(bias.data(), DType::kF32, {48});
      options.row_weight = TensorView(row_weight.data(), DType::kF32, {3});
      options.activation = Activation::kSilu;
      options.gated = gated;
      options.determinism = determinism;
      const std::vector<float> product = Product(*device_, a.view(), *prepared, options);
      EXPECT_EQ(product, Product(*device_, gathered.view(), *sorted, options));
      GemmProblem problem;
      problem.m = 3;
      problem.a_type = problem.out_type = DType::kF32;
      problem.activation = Activation::kSilu;
      problem.gated = gated;
      problem.determinism = determinism;
      const auto plan = PlanGemm(*device_, problem, *prepared);
      const auto inner = PlanGemm(*device_, problem, *sorted);
      ASSERT_TRUE(plan.ok() && inner.ok()) << plan.status().message();
      EXPECT_EQ(plan->kernel(), inner->kernel());
      EXPECT_EQ(plan->workspace_bytes(), inner->workspace_bytes() + 3 * 96 * 4);
      const auto workspace = DeviceBuffer::Allocate(*device_, plan->workspace_bytes());
      ASSERT_TRUE(workspace.ok());
      std::vector<float> out(product.size());
      const int64_t n = gated ? 24 : 48;
      const MutableTensorView view(out.data(), DType::kF32, {3, n});
      GemmArguments arguments{options.bias, options.row_weight};
      arguments.workspace = workspace->data();
      arguments.workspace_bytes = plan->workspace_bytes();
      ASSERT_TRUE(plan->Run(a.view(), view, arguments).ok());
      ASSERT_TRUE(device_->Synchronize().ok());
      EXPECT_EQ(out, product);
      arguments.workspace_bytes -= 1;
      EXPECT_EQ(plan->Run(a.view(), view, arguments).code(), Code::kInvalidArgument);
    }
  }
}

TEST_P(TransformedGemm, EveryMatrixOfAStackHasItsOwn) {
  const QuantizedWeights stack = Lattice(Format::kS4, 3, 64, 24, 8);
  const auto prepared = Prepare(stack, *device_);
  ASSERT_TRUE(prepared.ok()) << prepared.status().message();
  const Rows a(DType::kF32, 3 * 2, 64, 64, 6);
  std::vector<float> batched(3 * 2 * 24);
  ASSERT_TRUE(BatchedGemm(*device_, TensorView(a.bytes.data(), DType::kF32, {3, 2, 64}), *prepared,
                          MutableTensorView(batched.data(), DType::kF32, {3, 2, 24}))
                  .ok());
  ASSERT_TRUE(device_->Synchronize().ok());
  for (int64_t e = 0; e < 3; ++e) {
    GemmOptions options;
    options.expert = e;
    const std::vector<float> expected = Expected(stack, a, e);
    EXPECT_EQ(Product(*device_, a.view(), *prepared, options), expected);
    EXPECT_TRUE(std::equal(batched.begin() + e * 48, batched.begin() + e * 48 + 48,
                           expected.begin() + e * 48))
        << e;
  }
}

TEST_P(TransformedGemm, DequantizationAndLookupRestoreTheOrder) {
  const int64_t k = 150;
  const int64_t n = 40;
  const QuantizedWeights weights = Lattice(Format::kU4, 2, k, n, 5);
  const auto stack = Prepare(weights, *device_);
  ASSERT_TRUE(stack.ok());
  std::vector<float> expected(static_cast<size_t>(2 * k * n));
  ASSERT_TRUE(Dequantize(weights, MutableTensorView(expected.data(), DType::kF32, {2, k, n})).ok());
  for (int64_t e = 0; e < 2; ++e) {
    for (const bool transposed : {false, true}) {
      std::vector<float> out(static_cast<size_t>(k * n));
      const MutableTensorView view =
          transposed ? MutableTensorView(out.data(), DType::kF32, {n, k}).Transposed()
                     : MutableTensorView(out.data(), DType::kF32, {k, n});
      const Status status = Dequantize(*device_, *stack, view, e);
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_TRUE(device_->Synchronize().ok());
      for (int64_t i = 0; i < k * n; ++i) {
        const int64_t at = transposed ? i / n + i % n * k : i;
        ASSERT_EQ(out[static_cast<size_t>(at)], expected[static_cast<size_t>(e * k * n + i)]) << i;
      }
    }
  }
  const QuantizedWeights one = Lattice(Format::kS4, 1, k, n, 6);
  const auto table = Prepare(one, *device_);
  ASSERT_TRUE(table.ok());
  ASSERT_TRUE(Dequantize(one, MutableTensorView(expected.data(), DType::kF32, {k, n})).ok());
  const std::vector<int32_t> ids = {3, 39, 0, 3};
  std::vector<uint16_t> rows(4 * 160);
  const MutableTensorView out(rows.data(), DType::kF16, {4, k}, {160, 1});
  const Status status = LookUpRows(*device_, *table, ids, out);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_TRUE(device_->Synchronize().ok());
  for (size_t i = 0; i < 4; ++i) {
    for (int64_t c = 0; c < k; ++c) {
      ASSERT_EQ(HalfToFloat(rows[i * 160 + static_cast<size_t>(c)]),
                expected[static_cast<size_t>(c * n + ids[i])])
          << i << " " << c;
    }
  }
}

// More elements than one thread moves.
TEST_P(TransformedGemm, LargeMatricesAreMovedByAllThreads) {
  if (simulated()) GTEST_SKIP() << "has no threads for it";
  constexpr int64_t kK = 1100;
  const QuantizedWeights weights = Lattice(Format::kS4, 1, kK, 72, 12);
  const auto prepared = Prepare(weights, *device_);
  ASSERT_TRUE(prepared.ok());
  const Rows a(DType::kBf16, 70, kK, kK + 4, 9);
  EXPECT_EQ(Product(*device_, a.view(), *prepared), Expected(weights, a));
  std::vector<float> expected(kK * 72);
  std::vector<float> out(kK * 72);
  ASSERT_TRUE(Dequantize(weights, MutableTensorView(expected.data(), DType::kF32, {kK, 72})).ok());
  ASSERT_TRUE(
      Dequantize(*device_, *prepared, MutableTensorView(out.data(), DType::kF32, {kK, 72})).ok());
  ASSERT_TRUE(device_->Synchronize().ok());
  EXPECT_EQ(out, expected);
}

/// Every transform but a permutation alone.
const Transform kTransforms[] = {
    {false, true, 0}, {true, true, 0}, {false, false, 4}, {false, true, 16}, {false, false, 64}};

std::string NameOf(const Transform& transform) {
  return std::string(transform.permutation ? "permuted " : "") +
         (transform.scale ? "scaled " : "") + "h" + std::to_string(transform.hadamard);
}

TEST_P(TransformedGemm, ScaledAndRotatedInputsHaveTheReferencesSums) {
  for (const Transform& transform : kTransforms) {
    for (const Format format : {Format::kU4, Format::kS8, Format::kFp4E2M1}) {
      for (const DType type : {DType::kF32, DType::kBf16, DType::kF16}) {
        for (const int64_t m : {1, 5, 33}) {
          if (simulated() && (m == 33 || type == DType::kF16)) continue;
          SCOPED_TRACE(NameOf(transform) + " " + std::string(FormatName(format)) + " " +
                       std::string(DTypeName(type)) + " m " + std::to_string(m));
          constexpr int64_t kK = 192;
          const QuantizedWeights weights = Lattice(format, 1, kK, 40, 5, transform);
          const auto prepared = Prepare(weights, *device_);
          ASSERT_TRUE(prepared.ok()) << prepared.status().message();
          EXPECT_EQ(prepared->spec(), weights.spec);
          const Rows a(type, m, kK, kK + 3, 9);
          const std::vector<float> product = Product(*device_, a.view(), *prepared);
          EXPECT_EQ(product, Expected(weights, a));
          if (transform.permutation) continue;
          const auto stored = Prepare(Sorted(weights), *device_);
          ASSERT_TRUE(stored.ok());
          EXPECT_EQ(product, Product(*device_, a.Rotated(weights).view(), *stored));
        }
      }
    }
  }
}

/// Blocks whose norm is no power of two, up to all of k.
TEST_P(TransformedGemm, BlocksOfEverySizeRotate) {
  std::vector<int64_t> sizes = {16384};  // More shared memory than any kernel may have.
  for (int64_t size = 2; size <= 1024; size *= 2) sizes.push_back(size);
  for (const int64_t size : sizes) {
    SCOPED_TRACE(size);
    const int64_t k = std::max<int64_t>(size, 64);
    const int64_t n = size > 1024 ? 1 : 8;
    const QuantizedWeights weights = Lattice(Format::kS4, 1, k, n, 5, {false, true, size});
    const auto prepared = Prepare(weights, *device_);
    ASSERT_TRUE(prepared.ok()) << prepared.status().message();
    const Rows a(DType::kF32, 2, k, k, 9);
    GemmOptions options;
    options.accuracy = Accuracy::kExact;
    const std::vector<float> product = Product(*device_, a.view(), *prepared, options);
    const std::vector<float> expected = Expected(weights, a);
    for (size_t i = 0; i < product.size(); ++i) {
      ASSERT_NEAR(product[i], expected[i], 1e-5 * static_cast<double>(k)) << i;
    }
  }
}

TEST_P(TransformedGemm, DequantizationAndLookupUndoEveryTransform) {
  constexpr int64_t kK = 192;
  constexpr int64_t kN = 40;
  for (const Transform& transform : kTransforms) {
    SCOPED_TRACE(NameOf(transform));
    const QuantizedWeights stack = Lattice(Format::kU4, 2, kK, kN, 5, transform);
    const auto prepared = Prepare(stack, *device_);
    ASSERT_TRUE(prepared.ok()) << prepared.status().message();
    for (int64_t e = 0; e < 2; ++e) {
      const auto dense = reference::Dequantize(stack, e);
      ASSERT_TRUE(dense.ok());
      std::vector<uint16_t> out(kK * kN);
      const MutableTensorView view(out.data(), DType::kBf16, {kK, kN});
      ASSERT_TRUE(Dequantize(*device_, *prepared, view, e).ok());
      ASSERT_TRUE(device_->Synchronize().ok());
      for (size_t i = 0; i < out.size(); ++i) {
        ASSERT_EQ(out[i], FloatToBf16(static_cast<float>(dense->value[i]))) << e << " " << i;
      }
    }
    const QuantizedWeights one = Lattice(Format::kS4, 1, kK, kN, 6, transform);
    const auto dense = reference::Dequantize(one, 0);
    const auto table = Prepare(one, *device_);
    ASSERT_TRUE(dense.ok() && table.ok());
    const std::vector<int32_t> ids = {3, 39, 0, 3};
    std::vector<float> rows(4 * 200);
    const MutableTensorView out(rows.data(), DType::kF32, {4, kK}, {200, 1});
    const Status status = LookUpRows(*device_, *table, ids, out);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(device_->Synchronize().ok());
    for (size_t i = 0; i < 4; ++i) {
      for (size_t c = 0; c < kK; ++c) {
        ASSERT_EQ(rows[i * 200 + c],
                  static_cast<float>(dense->value[c * kN + static_cast<size_t>(ids[i])]))
            << i << " " << c;
      }
    }
  }
}

TEST_P(TransformedGemm, EmptyProblemsAreFine) {
  for (const auto& [m, k, n] : {std::tuple(0, 64, 8), {2, 0, 8}, {2, 64, 0}}) {
    const QuantizedWeights weights = Lattice(Format::kS4, 1, k, n, 1);
    const auto prepared = Prepare(weights, *device_);
    ASSERT_TRUE(prepared.ok()) << prepared.status().message();
    const Rows a(DType::kF32, m, k, std::max(k, 1), 2);
    for (const float value : Product(*device_, a.view(), *prepared)) EXPECT_EQ(value, 0.0F);
    std::vector<float> out(static_cast<size_t>(k * n));
    EXPECT_TRUE(
        Dequantize(*device_, *prepared, MutableTensorView(out.data(), DType::kF32, {k, n})).ok());
  }
}

TEST_P(TransformedGemm, ColumnsOfOnePermutationAreJoined) {
  const QuantizedWeights q = Lattice(Format::kS4, 1, 64, 24, 2);
  QuantizedWeights kv = Lattice(Format::kS4, 1, 64, 16, 3);
  kv.permutation = q.permutation;
  const WeightColumns columns[] = {{&kv, 0, 2, 8}, {&kv, 1, 2, 8}, {&q, 0, 1, 24}};
  const auto prepared = PrepareColumns(columns, *device_);
  const auto joined = JoinColumns(columns);
  ASSERT_TRUE(prepared.ok() && joined.ok()) << prepared.status().message();
  const Rows a(DType::kF32, 2, 64, 64, 3);
  EXPECT_EQ(Product(*device_, a.view(), *prepared), Expected(*joined, a));
}

TEST_P(TransformedGemm, AnImageKeepsTheTransform) {
  const QuantizedWeights weights = Lattice(Format::kU4, 1, 96, 24, 2, {true, true, 0});
  const auto prepared = Prepare(weights, *device_);
  ASSERT_TRUE(prepared.ok());
  auto image = ImageOf(*prepared, *device_);
  if (image.status().code() == Code::kUnsupported) GTEST_SKIP() << image.status().message();
  ASSERT_TRUE(image.ok());
  const auto again = FromImage(*image, *device_);
  ASSERT_TRUE(again.ok()) << again.status().message();
  const Rows a(DType::kF32, 2, 96, 96, 3);
  EXPECT_EQ(Product(*device_, a.view(), *again), Expected(weights, a));
  std::vector<std::byte> input(image->input.begin(), image->input.end());
  image->input = input;
  const int32_t outside = 96;
  std::memcpy(input.data() + 5 * 4, &outside, 4);
  EXPECT_EQ(FromImage(*image, *device_).status().message(),
            "permutation: 96 at [0, 5] is no row of 96");
  std::memcpy(input.data() + 5 * 4, OrderOf(weights) + 5, 4);
  const float infinite = std::numeric_limits<float>::infinity();
  std::memcpy(input.data() + (96 + 7) * 4, &infinite, 4);
  EXPECT_EQ(FromImage(*image, *device_).status().message(), "input_scale: not finite at [0, 7]");
  image->input = image->input.first(191 * 4);
  EXPECT_EQ(FromImage(*image, *device_).status().message(),
            "prepared weights: expected 768 bytes of input transform, got 764");
}

TEST_P(TransformedGemm, ExpertsHaveNone) {
  const auto sorted = Prepare(Sorted(Lattice(Format::kS4, 1, 64, 64, 2)), *device_);
  ASSERT_TRUE(sorted.ok());
  const auto set = [&](const PreparedWeights& up, const PreparedWeights& down) {
    const Expert expert{{*sorted, 0, {}}, {up, 0, {}}, {down, 0, {}}};
    return ExpertSet::Make(*device_, {&expert, 1}, {}).status();
  };
  EXPECT_TRUE(set(*sorted, *sorted).ok());
  const std::pair<Transform, std::string> cases[] = {{{true, true, 0}, "a permutation along k"},
                                                     {{false, true, 4}, "input scales"},
                                                     {{false, false, 4}, "Hadamard blocks"}};
  for (const auto& [transform, name] : cases) {
    const auto other = Prepare(Lattice(Format::kS4, 1, 64, 64, 2, transform), *device_);
    ASSERT_TRUE(other.ok());
    const std::string message =
        "weights with " + name + " cannot be experts; prepare FoldInput of them";
    EXPECT_EQ(set(*other, *sorted).code(), Code::kUnsupported);
    EXPECT_EQ(set(*other, *sorted).message(), "expert 0 up: " + message);
    EXPECT_EQ(set(*sorted, *other).message(), "expert 0 down: " + message);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, TransformedGemm, ::testing::ValuesIn(Devices()),
                         [](const auto& parameter) {
                           std::string name = parameter.param;
                           std::erase(name, '-');
                           return name;
                         });

}  // namespace
}  // namespace marlin::transformed_gemm_test
