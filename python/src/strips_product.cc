#include "strips_product.h"

#include <string>
#include <utility>

#include "backends/metal/gemm/foreign_product.h"
#include "backends/metal/plan/kernel_text.h"

namespace marlin::python {
namespace {

std::string TextOf(const std::string& file) {
  const Result<std::string> text = metal::KernelText(file);
  return text.ok() ? *text : "#error " + std::string(text.status().message()) + "\n";
}

class StripsProduct final : public MetalProduct {
 public:
  explicit StripsProduct(std::shared_ptr<const metal::PreparedStrips> strips)
      : strips_(std::move(strips)) {}

  std::string Plan(const ProductCall& call, const metal::DeviceShape& device,
                   std::vector<metal::KernelLaunch>* launches) const override {
    metal::ForeignCall product;
    product.m = call.m;
    product.type = call.type;
    product.expert = call.expert;
    product.has_bias = call.bias != nullptr;
    product.bias_type = call.bias_type;
    product.kernel = call.kernel;
    product.aligned = call.aligned;
    const Result<metal::GemmLaunches> planned = metal::ForeignLaunches(*strips_, product, device);
    if (!planned.ok()) return std::string(planned.status().message());
    launches->assign(planned->begin(), planned->end());
    return {};
  }

  metal::KernelLaunch PlanLookUp(int64_t rows, DType type) const override {
    return metal::ForeignLookUp(*strips_, rows, type);
  }
  std::string Text(const std::string& file) const override { return TextOf(file); }

 private:
  std::shared_ptr<const metal::PreparedStrips> strips_;
};

class StripsExperts final : public MetalExperts {
 public:
  explicit StripsExperts(std::shared_ptr<metal::ForeignExperts> experts)
      : experts_(std::move(experts)) {}

  int64_t image_bytes() const override { return experts_->image_bytes(); }
  void WriteImage(void* image, uint64_t address) override {
    experts_->WriteImage(static_cast<std::byte*>(image), address);
  }
  metal::ForeignExpertLaunches Plan(const metal::ForeignExpertsCall& call,
                                    const metal::DeviceShape& device) const override {
    return experts_->Launches(call, device);
  }
  std::string Text(const std::string& file) const override { return TextOf(file); }

 private:
  std::shared_ptr<metal::ForeignExperts> experts_;
};

}  // namespace

std::shared_ptr<MetalExperts> MakeMetalExperts(std::shared_ptr<metal::ForeignExperts> experts) {
  return std::make_shared<StripsExperts>(std::move(experts));
}

std::shared_ptr<const MetalProduct> MakeMetalProduct(
    std::shared_ptr<const metal::PreparedStrips> strips) {
  return std::make_shared<StripsProduct>(std::move(strips));
}

}  // namespace marlin::python
