#include "backends/metal/plan/kernel_check.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>
#include <vector>

#include "backends/metal/moe/router_check.h"
#include "base/checked.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "base/split_mix64.h"
#include "layout/packing.h"
#include "plan/gemm/select.h"
#include "plan/moe/experts.h"

namespace marlin::metal {
namespace {

/// One tile plus a remainder of outputs; several chunks of k plus a short one.
constexpr int64_t kN = 72;
constexpr int64_t kK = 528;
constexpr int64_t kGroupSize = 32;
/// Every kernel supports one of these formats; each has its own decoder.
constexpr Format kFormats[] = {Format::kFp4E2M1, Format::kU4, Format::kS8};

/// Codes and the values that they decode to.
struct Weights {
  std::vector<uint32_t> words;
  std::vector<uint16_t> scales;
  std::vector<float> values;  ///< [k][n], scaled.
  QuantizedWeights view;
};

Weights MakeWeights(Format format, int64_t k_count, int64_t n) {
  const FormatInfo& info = GetFormatInfo(format);
  const int64_t groups = CeilDivide(k_count, kGroupSize);
  const int64_t padded_k = RoundUp(k_count, int64_t{kPackRun});
  const std::span<const float> values = FormatValues(format);
  SplitMix64 random(1);
  std::vector<uint8_t> codes(static_cast<size_t>(n * padded_k));
  Weights weights;
  weights.values.resize(static_cast<size_t>(k_count * n));
  weights.scales.resize(static_cast<size_t>(groups * n));
  std::vector<float> scales(weights.scales.size());
  for (size_t i = 0; i < scales.size(); ++i) {
    scales[i] = random.Next() % 2 == 0 ? 1.0F : 0.5F;
    weights.scales[i] = FloatToHalf(scales[i]);
  }
  for (int64_t column = 0; column < n; ++column) {
    for (int64_t k = 0; k < k_count; ++k) {
      const auto code = static_cast<uint8_t>(random.Next() % values.size());
      codes[static_cast<size_t>(column * padded_k + k)] = code;
      weights.values[static_cast<size_t>(k * n + column)] =
          values[code] * scales[static_cast<size_t>(k / kGroupSize * n + column)];
    }
  }
  const int64_t rows = WordsAlongK(format, k_count);
  weights.words.resize(static_cast<size_t>(rows * n));
  PackColumns(info.bits, {codes.data(), padded_k, k_count, n}, weights.words.data(), n);
  weights.view.spec.format = format;
  weights.view.spec.k = k_count;
  weights.view.spec.n = n;
  weights.view.spec.group_size = kGroupSize;
  weights.view.codes = TensorView(weights.words.data(), DType::kU32, Shape{1, rows, n});
  weights.view.scales = TensorView(weights.scales.data(), DType::kF16, Shape{1, groups, n});
  return weights;
}

/// An owned allocation on the device.
class DeviceBlock {
 public:
  explicit DeviceBlock(const Backend& backend) : backend_(backend) {}
  ~DeviceBlock() {
    if (data_ != nullptr) backend_.Free(data_);
  }
  DeviceBlock(const DeviceBlock&) = delete;
  DeviceBlock& operator=(const DeviceBlock&) = delete;
  Status Allocate(int64_t bytes) {
    MARLIN_ASSIGN_OR_RETURN(data_, backend_.Allocate(bytes));
    return Status();
  }
  void* data() const { return data_; }

 private:
  const Backend& backend_;
  void* data_ = nullptr;
};

GemmDesc DescOf(const KernelDesc& kernel, Format format) {
  GemmDesc desc;
  // Large-M kernels (tile_m 64): one tile plus a remainder. Others: half of tile_m, rounded up.
  desc.m = kernel.tile_m == 64 ? 70 : (kernel.tile_m + 1) / 2;
  desc.n = kN;
  desc.k = kK;
  desc.format = format;
  desc.group_size = kGroupSize;
  desc.a_type = DType::kBf16;
  return desc;
}

/// Integers that are exact in bf16.
std::vector<float> MakeActivations(int64_t m) {
  SplitMix64 random(2);
  std::vector<float> a(static_cast<size_t>(m * kK));
  for (float& value : a) value = static_cast<float>(random.Next() % 7) - 3;
  return a;
}

/// Describes the first output that differs from the host's; empty: none.
std::string FirstDifference(const std::vector<float>& a, const std::vector<float>& weights,
                            const std::vector<float>& out) {
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t row = i / kN;
    const size_t column = i % kN;
    float sum = 0;
    for (size_t k = 0; k < kK; ++k) sum += a[row * kK + k] * weights[k * kN + column];
    if (out[i] != sum) {
      return fmt::format("out[{}, {}] is {}, expected {}", row, column, out[i], sum);
    }
  }
  return {};
}

Status CheckKernel(const Backend& backend, const KernelDesc& kernel, Format format) {
  const Weights weights = MakeWeights(format, kK, kN);
  MARLIN_ASSIGN_OR_RETURN(const auto prepared, backend.Prepare(weights.view, {}));
  GemmCall call;
  call.desc = DescOf(kernel, format);
  call.weights = prepared.get();
  call.a_stride = kK;
  call.c_stride = kN;
  const std::vector<float> a = MakeActivations(call.desc.m);
  std::vector<uint16_t> a_bits(a.size());
  std::transform(a.begin(), a.end(), a_bits.begin(), FloatToBf16);
  std::vector<float> out(static_cast<size_t>(call.desc.m * kN), -1);
  const auto a_bytes = static_cast<int64_t>(a_bits.size() * sizeof(uint16_t));
  const auto out_bytes = static_cast<int64_t>(out.size() * sizeof(float));

  DeviceBlock device_a(backend);
  DeviceBlock device_c(backend);
  DeviceBlock workspace(backend);
  MARLIN_RETURN_IF_ERROR(device_a.Allocate(a_bytes));
  MARLIN_RETURN_IF_ERROR(device_c.Allocate(out_bytes));
  MARLIN_ASSIGN_OR_RETURN(const auto plan, backend.Plan(kernel, call.desc, {}, *prepared));
  MARLIN_RETURN_IF_ERROR(workspace.Allocate(std::max<int64_t>(plan->workspace_bytes(), 1)));
  call.a = device_a.data();
  call.c = device_c.data();
  call.workspace = workspace.data();
  MARLIN_RETURN_IF_ERROR(backend.CopyToDevice(device_a.data(), a_bits.data(), a_bytes));
  MARLIN_RETURN_IF_ERROR(backend.CopyToDevice(device_c.data(), out.data(), out_bytes));
  MARLIN_RETURN_IF_ERROR(plan->Run(call));
  MARLIN_RETURN_IF_ERROR(backend.CopyToHost(out.data(), device_c.data(), out_bytes));
  const std::string difference = FirstDifference(a, weights.values, out);
  if (difference.empty()) return Status();
  return Status(Code::kUnsupported, fmt::format("self-test: {}: {}", kernel.name, difference));
}

// A layer of three experts, the last of which is not here: the first takes so few rows that they
// are a GEMV, the second enough for a GEMM.
constexpr int64_t kHidden = 72;
constexpr int64_t kInner = 40;
constexpr int64_t kTokens = 24;
/// One of each expert: they are not sorted.
constexpr int64_t kFewTokens = 2;
constexpr Format kExpertFormats[] = {Format::kU4, Format::kFp4E2M1};

constexpr int32_t ExpertOf(int64_t token) {
  return token % 8 == 0 ? 0 : static_cast<int32_t>(1 + token % 8 / 7);
}

/// gate | up and down of an expert, and both as prepared by the device.
struct ExpertWeights {
  Weights both;
  Weights down;
  std::shared_ptr<const PreparedWeights::Storage> ready_both;
  std::shared_ptr<const PreparedWeights::Storage> ready_down;
};

Result<ExpertWeights> MakeExpert(const Backend& backend, Format format) {
  ExpertWeights expert{MakeWeights(format, kHidden, 2 * kInner),
                       MakeWeights(format, kInner, kHidden), nullptr, nullptr};
  MARLIN_ASSIGN_OR_RETURN(expert.ready_both, backend.Prepare(expert.both.view, {}));
  MARLIN_ASSIGN_OR_RETURN(expert.ready_down, backend.Prepare(expert.down.view, {}));
  return expert;
}

/// Output `column` of an expert for an x that is 1 at the first `ones` features: less than 2^24
/// times the unit of all summands, and so exact in any order.
float ExpertResult(const ExpertWeights& expert, int64_t ones, int64_t column) {
  float sum = 0;
  for (int64_t i = 0; i < kInner; ++i) {
    float gate = 0;
    float up = 0;
    for (int64_t k = 0; k < ones; ++k) {
      const auto row = static_cast<size_t>(k * 2 * kInner);
      gate += expert.both.values[row + static_cast<size_t>(i)];
      up += expert.both.values[row + static_cast<size_t>(kInner + i)];
    }
    sum +=
        std::max(gate, 0.0F) * up * expert.down.values[static_cast<size_t>(i * kHidden + column)];
  }
  return sum;
}

/// Runs the layer; token t has 1 to 3 ones and the routing weight 2.
Status RunExperts(const Backend& backend, const LayerExperts& layer, int64_t tokens,
                  std::vector<float>* out) {
  ExpertsProblem problem;
  problem.tokens = tokens;
  problem.top_k = 1;
  problem.x_type = problem.out_type = DType::kF32;
  problem.gate.activation = Activation::kRelu;
  const SelectGemm select = [](const GemmDesc& /*desc*/) {
    return Result<KernelChoice>(KernelChoice());
  };
  MARLIN_ASSIGN_OR_RETURN(const auto plan, backend.PlanExperts(problem, layer, select));
  const int64_t row_bytes = tokens * kHidden * int64_t{sizeof(float)};
  DeviceBlock block(backend);
  DeviceBlock workspace(backend);
  MARLIN_RETURN_IF_ERROR(block.Allocate(2 * row_bytes + 2 * tokens * int64_t{sizeof(float)}));
  MARLIN_RETURN_IF_ERROR(workspace.Allocate(plan->workspace_bytes()));
  auto* const x = static_cast<float*>(block.data());
  float* const device_out = x + tokens * kHidden;
  float* const weights = device_out + tokens * kHidden;
  auto* const ids = reinterpret_cast<int32_t*>(weights + tokens);
  // Memory is shared.
  std::fill_n(x, tokens * kHidden, 0.0F);
  for (int64_t t = 0; t < tokens; ++t) {
    std::fill_n(x + t * kHidden, 1 + t % 3, 1.0F);
    weights[t] = 2;
    ids[t] = ExpertOf(t);
  }
  ExpertsCall call;
  call.x = x;
  call.x_stride = call.out_stride = kHidden;
  call.ids = ids;
  call.weights = weights;
  call.out = device_out;
  call.workspace = static_cast<std::byte*>(workspace.data());
  MARLIN_RETURN_IF_ERROR(plan->Run(call));
  return backend.CopyToHost(out->data(), device_out, row_bytes);
}

/// Compares the first `tokens` with the host, bit for bit.
Status CheckTokens(const Backend& backend, const LayerExperts& layer,
                   std::span<const ExpertWeights> experts, int64_t tokens) {
  std::vector<float> out(static_cast<size_t>(tokens * kHidden), -1);
  MARLIN_RETURN_IF_ERROR(RunExperts(backend, layer, tokens, &out));
  for (int64_t i = 0; i < tokens * kHidden; ++i) {
    const int64_t token = i / kHidden;
    const auto id = static_cast<size_t>(ExpertOf(token));
    const float expected =
        id < experts.size() ? 2 * ExpertResult(experts[id], 1 + token % 3, i % kHidden) : 0;
    const float got = out[static_cast<size_t>(i)];
    if (got == expected) continue;
    return Status(Code::kUnsupported,
                  fmt::format("self-test: experts: out[{}, {}] is {}, expected {}", token,
                              i % kHidden, got, expected));
  }
  return Status();
}

Status CheckExperts(const Backend& backend) {
  std::vector<ExpertWeights> experts;
  std::vector<ExpertOperands> operands(3);
  for (const Format format : kExpertFormats) {
    MARLIN_ASSIGN_OR_RETURN(ExpertWeights expert, MakeExpert(backend, format));
    ExpertOperands& operand = operands[experts.size()];
    operand.gate.weights = expert.ready_both.get();
    operand.down.weights = expert.ready_down.get();
    experts.push_back(std::move(expert));
  }
  LayerExperts layer;
  layer.experts = operands;
  layer.hidden = kHidden;
  MARLIN_RETURN_IF_ERROR(CheckTokens(backend, layer, experts, kTokens));
  return CheckTokens(backend, layer, experts, kFewTokens);
}

}  // namespace

Status CheckKernels(const Backend& backend) {
  for (const KernelDesc& kernel : backend.Kernels()) {
    for (const Format format : kFormats) {
      if (!CheckSupport(kernel, DescOf(kernel, format), backend.Properties()).ok()) continue;
      MARLIN_RETURN_IF_ERROR(CheckKernel(backend, kernel, format));
      break;
    }
  }
  MARLIN_RETURN_IF_ERROR(CheckExperts(backend));
  return CheckRouters(backend);
}

}  // namespace marlin::metal
