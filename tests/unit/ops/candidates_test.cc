// The candidates for running a GEMM, with the CPU's kernels, one of which claims variants here.
#include "ops/gemm/candidates.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "backends/cpu/cpu_backend.h"
#include "marlin/quantize.h"
#include "ops/device/device.h"
#include "plan/gemm/backend.h"
#include "plan/gemm/kernel_name.h"

namespace marlin::candidates_test {
namespace {

constexpr KernelVariant kListed = {16, 1};
constexpr KernelVariant kUnlisted = {32, 2};

/// The CPU with two runnable variants per kernel, one of which is listed.
class CuttingBackend final : public Backend {
 public:
  explicit CuttingBackend(std::unique_ptr<Backend> cpu) : cpu_(std::move(cpu)) {}

  DeviceInfo Info() const override { return cpu_->Info(); }
  DeviceProperties Properties() const override { return cpu_->Properties(); }
  std::span<const KernelDesc> Kernels() const override { return cpu_->Kernels(); }
  Result<std::shared_ptr<const PreparedWeights::Storage>> Prepare(
      const QuantizedWeights& weights, const PrepareOptions& options) const override {
    auto storage = cpu_->Prepare(weights, options);
    if (storage.ok()) {
      std::const_pointer_cast<PreparedWeights::Storage>(*storage)->backend = this;
    }
    return storage;
  }
  std::vector<KernelVariant> Variants(const KernelDesc& /*kernel*/,
                                      const GemmDesc& /*desc*/) const override {
    return {kListed};
  }
  bool CanRunAs(const KernelDesc& /*kernel*/, const GemmDesc& /*desc*/,
                const KernelVariant& variant) const override {
    return variant == kListed || variant == kUnlisted;
  }
  double Cost(const KernelDesc& kernel, const GemmDesc& desc) const override {
    return cpu_->Cost(kernel, desc);
  }
  Result<std::shared_ptr<const PlannedGemm>> Plan(
      const KernelDesc& kernel, const GemmDesc& desc, const KernelVariant& variant,
      const PreparedWeights::Storage& weights) const override {
    return cpu_->Plan(kernel, desc, variant.automatic() ? kListed : variant, weights);
  }
  Status Dequantize(const PreparedWeights::Storage& weights, int64_t expert,
                    const MutableTensorView& out, void* stream) const override {
    return cpu_->Dequantize(weights, expert, out, stream);
  }
  const DecoderBackend* decoder() const override { return cpu_->decoder(); }
  Result<void*> Allocate(int64_t bytes) const override { return cpu_->Allocate(bytes); }
  void Free(void* data) const override { cpu_->Free(data); }
  Status CopyToDevice(void* device, const void* host, int64_t bytes) const override {
    return cpu_->CopyToDevice(device, host, bytes);
  }
  Status CopyToHost(void* host, const void* device, int64_t bytes) const override {
    return cpu_->CopyToHost(host, device, bytes);
  }
  Status Synchronize(void* stream) const override { return cpu_->Synchronize(stream); }
  bool calls_block() const override { return true; }

 private:
  std::unique_ptr<Backend> cpu_;
};

/// Returns a device whose tuning table has one kernel for m = 16 with a 64 x 64 matrix; empty: no
/// table.
Device DeviceWith(const std::string& kernel) {
  Tuning tuning;
  if (!kernel.empty()) {
    const auto sections = ParseTuning(
        "metal-marlin tuning 2\ndevice d\nfp4_e2m1 128 fp16 none bf16 f32 plain 64 64 16 " +
            kernel + " 5\n",
        "t");
    EXPECT_TRUE(sections.ok()) << sections.status().message();
    tuning.table.Add(*sections, "d");
  }
  auto cpu = cpu::OpenCpu({.threads = 1});
  return Internals::Make<Device>(std::make_shared<Device::Impl>(
      std::make_unique<CuttingBackend>(std::move(*cpu)), std::move(tuning)));
}

std::vector<GemmCandidate> CandidatesOf(const Device& device) {
  const std::vector<float> dense(64 * 64, 1.0F);
  const auto weights = Quantize({dense.data(), DType::kF32, {64, 64}}, {.group_size = 64});
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  const auto prepared = Prepare(*weights, device);
  EXPECT_TRUE(prepared.ok()) << prepared.status().message();
  std::vector<uint16_t> a(16 * 64);
  std::vector<float> c(16 * 64);
  const auto candidates = ListCandidates(device, {a.data(), DType::kBf16, {16, 64}}, *prepared,
                                         {c.data(), DType::kF32, {16, 64}}, GemmOptions());
  EXPECT_TRUE(candidates.ok()) << candidates.status().message();
  return candidates.ok() ? *candidates : std::vector<GemmCandidate>();
}

/// Returns the one planned candidate; fails if there is none or more than one.
std::string PlannedOf(const std::vector<GemmCandidate>& candidates) {
  std::string name;
  for (const GemmCandidate& candidate : candidates) {
    if (!candidate.planned) continue;
    EXPECT_EQ(name, "") << "another is planned as well: " << candidate.name;
    name = candidate.name;
    EXPECT_TRUE(candidate.selectable) << name;
  }
  EXPECT_NE(name, "") << "nothing is planned";
  return name;
}

TEST(ListCandidates, HoldsWhatIsPlannedOnce) {
  const std::string ruled = PlannedOf(CandidatesOf(DeviceWith("")));
  const std::string kernel = ruled.substr(0, ruled.find('@'));
  EXPECT_EQ(ruled, ToString(kernel, kListed));
  for (const KernelVariant& variant : {kListed, kUnlisted}) {
    const std::string name = ToString(kernel, variant);
    EXPECT_EQ(PlannedOf(CandidatesOf(DeviceWith(name))), name);
  }
}

TEST(ListCandidates, ListsNoOtherVariantThatAKernelDoesNot) {
  const size_t count = CandidatesOf(DeviceWith("")).size();
  const std::string ruled = PlannedOf(CandidatesOf(DeviceWith("")));
  const std::string kernel = ruled.substr(0, ruled.find('@'));
  EXPECT_EQ(CandidatesOf(DeviceWith(ToString(kernel, kListed))).size(), count);
  EXPECT_EQ(CandidatesOf(DeviceWith(ToString(kernel, kUnlisted))).size(), count + 1);
}

}  // namespace
}  // namespace marlin::candidates_test
