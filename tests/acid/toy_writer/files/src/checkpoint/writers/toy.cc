// "toy": X.weight is stored as X.weight_toy u8 [n, k / 2], s4 codes along k with even k in the low
// nibble, and X.weight_toy_scale f32 [n].
#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "checkpoint/codes/foreign_codes.h"
#include "checkpoint/module_writer.h"

namespace marlin {
namespace {

constexpr std::string_view kToyName = "toy";

class ToyWriter final : public ModuleWriter {
 public:
  Result<OutputUnit> Plan(const ForeignModule& module) const override {
    const WeightsSpec& spec = module.spec;
    if (spec.format != Format::kS4 || spec.has_zeros || spec.scale_type != ScaleType::kF32) {
      return WouldLose(kToyName, fmt::format("{} with {} scales", FormatName(spec.format),
                                             ScaleTypeName(spec.scale_type)));
    }
    if (spec.group_size < spec.k || spec.k % 2 != 0) {
      return CannotHold(kToyName, fmt::format("{} k in groups of {}", spec.k, spec.group_size));
    }
    return OutputUnit{
        {module.name + ".weight_toy", DType::kU8, {spec.n, spec.k / 2}},
        {module.name + ".weight_toy_scale", DType::kF32, {spec.n}},
    };
  }

  Status Write(const QuantizedWeights& matrix, TensorSink* sink) const override {
    const int64_t row = matrix.spec.k / 2;
    std::vector<uint8_t> bytes(static_cast<size_t>(matrix.spec.n * row));
    const auto pack = [&](int64_t first, int64_t count, const uint8_t* codes, int64_t stride) {
      for (int64_t n = 0; n < count; ++n) {
        const uint8_t* const column = codes + n * stride;
        for (int64_t i = 0; i < row; ++i) {
          bytes[static_cast<size_t>((first + n) * row + i)] =
              static_cast<uint8_t>(column[2 * i] | column[2 * i + 1] << 4);
        }
      }
      return Status();
    };
    MARLIN_RETURN_IF_ERROR(ForEachColumns(matrix, 0, pack));
    MARLIN_RETURN_IF_ERROR(sink->Append(0, bytes.data(), static_cast<int64_t>(bytes.size())));
    return sink->Append(1, matrix.scales.data(), 4 * matrix.spec.n);
  }

  Status Configure(std::span<const ForeignModule> /*modules*/,
                   std::span<const std::string> /*plain*/, Json* config) const override {
    (*config)["quantization_config"] = {{"quant_method", kToyName}};
    return {};
  }
};

}  // namespace

MakeWriter MakeToyWriter;

std::unique_ptr<const ModuleWriter> MakeToyWriter() { return std::make_unique<ToyWriter>(); }

}  // namespace marlin
