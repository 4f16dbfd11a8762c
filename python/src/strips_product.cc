#include "strips_product.h"

#include <utility>

#include "backends/metal/gemm/foreign_product.h"
#include "backends/metal/plan/kernel_text.h"

namespace marlin::python {
namespace {

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
    const Result<metal::GemmLaunches> planned = metal::ForeignLaunches(*strips_, product, device);
    if (!planned.ok()) return std::string(planned.status().message());
    launches->assign(planned->begin(), planned->end());
    return {};
  }

  std::string Text(const std::string& file) const override {
    const Result<std::string> text = metal::KernelText(file);
    return text.ok() ? *text : "#error " + std::string(text.status().message()) + "\n";
  }

 private:
  std::shared_ptr<const metal::PreparedStrips> strips_;
};

}  // namespace

std::shared_ptr<const MetalProduct> MakeMetalProduct(
    std::shared_ptr<const metal::PreparedStrips> strips) {
  return std::make_shared<StripsProduct>(std::move(strips));
}

}  // namespace marlin::python
