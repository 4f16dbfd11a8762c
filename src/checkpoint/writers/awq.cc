// AWQ, its gemm packing: 4-bit codes along n, eight to a word in the order 0 2 4 6 1 3 5 7.
//
//   X.qweight i32 [k, n / 8]   X.qzeros i32 [groups, n / 8]   X.scales f16 or bf16 [groups, n]
#include <fmt/core.h>

#include <array>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "checkpoint/codes/foreign_codes.h"
#include "checkpoint/module_writer.h"

namespace marlin {
namespace {

constexpr std::string_view kAwqName = "awq";
constexpr std::array<int, 8> kOrder = {0, 2, 4, 6, 1, 3, 5, 7};

/// Packs eight columns of codes, the column of each nibble `stride` apart.
uint32_t PackNibbles(const uint8_t* codes, int64_t stride) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) {
    word |= static_cast<uint32_t>(codes[kOrder[static_cast<size_t>(i)] * stride]) << (4 * i);
  }
  return word;
}

DType ScalesOf(const WeightsSpec& spec) {
  return spec.scale_type == ScaleType::kBf16 ? DType::kBf16 : DType::kF16;
}

/// The codes of a matrix as words of eight columns, [k, n / 8].
Result<std::vector<uint32_t>> PackCodes(const QuantizedWeights& matrix) {
  const WeightsSpec& spec = matrix.spec;
  const int64_t row = spec.n / 8;
  std::vector<uint32_t> words(static_cast<size_t>(spec.k * row));
  const auto pack = [&](int64_t first, int64_t count, const uint8_t* codes, int64_t stride) {
    for (int64_t k = 0; k < spec.k; ++k) {
      for (int64_t c = 0; c < count; c += 8) {
        words[static_cast<size_t>(k * row + (first + c) / 8)] =
            PackNibbles(codes + c * stride + k, stride);
      }
    }
    return Status();
  };
  MARLIN_RETURN_IF_ERROR(ForEachColumns(matrix, 0, pack));
  return words;
}

class AwqWriter final : public ModuleWriter {
 public:
  Result<OutputUnit> Plan(const ForeignModule& module) const override {
    const WeightsSpec& spec = module.spec;
    if (UnsignedCodesOf(spec.format).bits != 4) {
      return WouldLose(kAwqName, FormatName(spec.format));
    }
    MARLIN_RETURN_IF_ERROR(CheckScaledIntegers(kAwqName, spec));
    if (spec.n % 8 != 0) {
      return CannotHold(kAwqName, fmt::format("{} outputs, which are no multiple of 8", spec.n));
    }
    MARLIN_RETURN_IF_ERROR(CheckWholeGroups(kAwqName, spec));
    const int64_t groups = GroupCount(spec);
    return OutputUnit{
        {module.name + ".qweight", DType::kI32, {spec.k, spec.n / 8}},
        {module.name + ".qzeros", DType::kI32, {groups, spec.n / 8}},
        {module.name + ".scales", ScalesOf(spec), {groups, spec.n}},
    };
  }

  Status Write(const QuantizedWeights& matrix, TensorSink* sink) const override {
    const WeightsSpec& spec = matrix.spec;
    MARLIN_ASSIGN_OR_RETURN(const std::vector<uint32_t> words, PackCodes(matrix));
    MARLIN_ASSIGN_OR_RETURN(const std::vector<uint8_t> zeros, UnsignedZeros(kAwqName, matrix));
    std::vector<uint32_t> packed;
    packed.reserve(zeros.size() / 8);
    for (size_t i = 0; i < zeros.size(); i += 8) packed.push_back(PackNibbles(&zeros[i], 1));
    MARLIN_ASSIGN_OR_RETURN(const std::vector<std::byte> scales,
                            ConvertedParameters(kAwqName, "scale", matrix.scales, ScalesOf(spec)));
    MARLIN_RETURN_IF_ERROR(sink->AppendAll(0, words));
    MARLIN_RETURN_IF_ERROR(sink->AppendAll(1, packed));
    return sink->AppendAll(2, scales);
  }

  Status Configure(std::span<const ForeignModule> modules, std::span<const std::string> plain,
                   Json* config) const override {
    const auto group_of = [](const ForeignModule& module) {
      return module.spec.group_size >= module.spec.k ? int64_t{-1} : module.spec.group_size;
    };
    for (const ForeignModule& module : modules) {
      if (group_of(module) == group_of(modules.front())) continue;
      return WouldLose(kAwqName, fmt::format("groups of {} in \"{}\" and of {} in \"{}\"",
                                             group_of(modules.front()), modules.front().name,
                                             group_of(module), module.name));
    }
    Json quantization = {
        {"quant_method", "awq"}, {"version", "gemm"}, {"bits", 4}, {"zero_point", true}};
    quantization["group_size"] = modules.empty() ? int64_t{-1} : group_of(modules.front());
    quantization["modules_to_not_convert"] = std::vector<std::string>(plain.begin(), plain.end());
    (*config)["quantization_config"] = std::move(quantization);
    return {};
  }
};

}  // namespace

MakeWriter MakeAwqWriter;

std::unique_ptr<const ModuleWriter> MakeAwqWriter() { return std::make_unique<AwqWriter>(); }

}  // namespace marlin
