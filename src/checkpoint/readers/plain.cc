// Checkpoints in floating point: every tensor is plain.
#include "checkpoint/module_reader.h"

namespace marlin {
namespace {

class PlainReader final : public ModuleReader {
 public:
  std::vector<PartTensor> Parts(const ModuleRecord& /*record*/) const override { return {}; }
  Result<QuantizedWeights> Load(const ModuleRecord& /*record*/) const override {
    return Status(Code::kInternal, "a plain checkpoint has no modules");
  }
};

}  // namespace

OpenReader OpenPlain;

Result<std::unique_ptr<const ModuleReader>> OpenPlain(TensorStore& /*store*/,
                                                      const QuantMethod& /*method*/) {
  return std::unique_ptr<const ModuleReader>(std::make_unique<PlainReader>());
}

}  // namespace marlin
