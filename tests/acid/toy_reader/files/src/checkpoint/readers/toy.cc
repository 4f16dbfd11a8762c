// quant_method "toy": X.weight is stored as X.weight_toy u8 [n, k / 2], s4 codes along k with even
// k in the low nibble, and X.weight_toy_scale f32 [n].
#include <fmt/format.h>

#include <cstring>
#include <optional>

#include "base/macros.h"
#include "checkpoint/module_reader.h"
#include "layout/weights_buffer.h"

namespace marlin {
namespace {

constexpr std::string_view kCodes = "_toy";

class ToyReader final : public ModuleReader {
 public:
  explicit ToyReader(const TensorStore& store) : store_(store) {}

  Status Open() {
    for (const TensorInfo& codes : store_.tensors) {
      if (!codes.name.ends_with(kCodes)) continue;
      ModuleRecord record;
      record.module.name = codes.name.substr(0, codes.name.size() - kCodes.size());
      record.module.layer_class = ClassifyTensor(record.module.name);
      const std::optional<size_t> scale = store_.FindTensor(codes.name + "_scale");
      const bool fits = scale && codes.dtype == DType::kU8 && codes.shape.rank() == 2 &&
                        codes.shape[1] > 0 && codes.shape[1] % 4 == 0 &&
                        store_.tensors[*scale].dtype == DType::kF32 &&
                        store_.tensors[*scale].shape == Shape{codes.shape[0]};
      if (!fits) {
        return Status(Code::kMalformedFile,
                      fmt::format("{}: tensor \"{}\" and its scale do not fit",
                                  Printable(store_.path), Printable(codes.name)));
      }
      const int64_t k = 2 * codes.shape[1];
      record.module.spec = {.format = Format::kS4,
                            .k = k,
                            .n = codes.shape[0],
                            .group_size = k,
                            .scale_type = ScaleType::kF32};
      modules_.push_back(std::move(record));
    }
    return {};
  }

  std::vector<PartTensor> Parts(const ModuleRecord& record) const override {
    const std::string codes = record.module.name + std::string(kCodes);
    return {{ModulePart::kCodes, *store_.FindTensor(codes)},
            {ModulePart::kScales, *store_.FindTensor(codes + "_scale")}};
  }

  Result<QuantizedWeights> Load(const ModuleRecord& record) const override {
    const WeightsSpec& spec = record.module.spec;
    MARLIN_ASSIGN_OR_RETURN(WeightsBuffer buffer, AllocateWeights(spec));
    const std::vector<PartTensor> parts = Parts(record);
    const std::byte* bytes = store_.Data(parts[0].tensor);
    auto* words = static_cast<uint32_t*>(buffer.codes);
    // Four bytes hold eight codes, lowest first: a word of the canonical layout, transposed.
    for (int64_t n = 0; n < spec.n; ++n) {
      for (int64_t w = 0; w < spec.k / 8; ++w) {
        std::memcpy(&words[w * spec.n + n], bytes + n * spec.k / 2 + 4 * w, 4);
      }
    }
    std::memcpy(buffer.scales, store_.Data(parts[1].tensor), static_cast<size_t>(spec.n) * 4);
    return std::move(buffer.weights);
  }

 private:
  const TensorStore& store_;
};

}  // namespace

OpenReader OpenToy;

Result<std::unique_ptr<const ModuleReader>> OpenToy(TensorStore& store,
                                                    const QuantMethod& /*method*/) {
  auto reader = std::make_unique<ToyReader>(store);
  MARLIN_RETURN_IF_ERROR(reader->Open());
  return std::unique_ptr<const ModuleReader>(std::move(reader));
}

}  // namespace marlin
