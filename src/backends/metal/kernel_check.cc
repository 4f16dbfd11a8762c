#include "backends/metal/kernel_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/macros.h"
#include "base/scalars.h"
#include "base/split_mix64.h"
#include "layout/packing.h"
#include "plan/select.h"

namespace marlin::metal {
namespace {

/// One tile plus a remainder of outputs; several chunks of k plus a short one.
constexpr int64_t kN = 72;
constexpr int64_t kK = 528;
constexpr int64_t kGroupSize = 32;
constexpr int64_t kGroups = (kK + kGroupSize - 1) / kGroupSize;
constexpr int64_t kPaddedK = (kK + kPackRun - 1) / kPackRun * kPackRun;
/// Every kernel supports one of these formats; each has its own decoder.
constexpr Format kFormats[] = {Format::kFp4E2M1, Format::kU4, Format::kS8};

/// Codes and the values that they decode to.
struct Weights {
  std::vector<uint32_t> words;
  std::vector<uint16_t> scales;
  std::vector<float> values;  ///< [k][n], scaled.
  QuantizedWeights view;
};

Weights MakeWeights(Format format) {
  const FormatInfo& info = GetFormatInfo(format);
  const std::span<const float> values = FormatValues(format);
  SplitMix64 random(1);
  std::vector<uint8_t> codes(static_cast<size_t>(kN * kPaddedK));
  Weights weights;
  weights.values.resize(static_cast<size_t>(kK * kN));
  weights.scales.resize(static_cast<size_t>(kGroups * kN));
  std::vector<float> scales(weights.scales.size());
  for (size_t i = 0; i < scales.size(); ++i) {
    scales[i] = random.Next() % 2 == 0 ? 1.0F : 0.5F;
    weights.scales[i] = FloatToHalf(scales[i]);
  }
  for (int64_t column = 0; column < kN; ++column) {
    for (int64_t k = 0; k < kK; ++k) {
      const auto code = static_cast<uint8_t>(random.Next() % values.size());
      codes[static_cast<size_t>(column * kPaddedK + k)] = code;
      weights.values[static_cast<size_t>(k * kN + column)] =
          values[code] * scales[static_cast<size_t>(k / kGroupSize * kN + column)];
    }
  }
  const int64_t rows = WordsAlongK(format, kK);
  weights.words.resize(static_cast<size_t>(rows * kN));
  PackColumns(info.bits, {codes.data(), kPaddedK, kK, kN}, weights.words.data(), kN);
  weights.view.spec.format = format;
  weights.view.spec.k = kK;
  weights.view.spec.n = kN;
  weights.view.spec.group_size = kGroupSize;
  weights.view.codes = TensorView(weights.words.data(), DType::kU32, Shape{1, rows, kN});
  weights.view.scales = TensorView(weights.scales.data(), DType::kF16, Shape{1, kGroups, kN});
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
  const Weights weights = MakeWeights(format);
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

}  // namespace

Status CheckKernels(const Backend& backend) {
  for (const KernelDesc& kernel : backend.Kernels()) {
    for (const Format format : kFormats) {
      if (!CheckSupport(kernel, DescOf(kernel, format), backend.Properties()).ok()) continue;
      MARLIN_RETURN_IF_ERROR(CheckKernel(backend, kernel, format));
      break;
    }
  }
  return Status();
}

}  // namespace marlin::metal
