// GPTQ, version 2 of its packing: codes along k as in the canonical layout, zeros along n.
//
//   X.qweight i32 [k * bits / 32, n]   X.qzeros i32 [groups, n * bits / 32]
//   X.scales  f16 [groups, n]          X.g_idx  i32 [k], the group of every k
//
// Codes and zeros of 5 and 6 bits lie in planes (bit_planes.h), the format gptq_p, in which codes
// of 3 bits would, too.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/codes/bit_planes.h"
#include "checkpoint/codes/foreign_codes.h"
#include "checkpoint/codes/unpack.h"
#include "checkpoint/module_writer.h"
#include "layout/permutation.h"

namespace marlin {
namespace {

constexpr std::string_view kGptqName = "gptq";

Json Settings(const ForeignModule& module) {
  const WeightsSpec& spec = module.spec;
  return {{"bits", UnsignedCodesOf(spec.format).bits},
          {"group_size", spec.group_size >= spec.k ? int64_t{-1} : spec.group_size},
          {"sym", !spec.has_zeros}};
}

/// A regular expression that matches one name.
std::string Exactly(const std::string& name) {
  std::string pattern;
  for (const char c : name) {
    if (c == '.') pattern += '\\';
    pattern += c;
  }
  return "^" + pattern + "$";
}

/// Whether the groups of a module lie across k.
bool IsActOrder(std::span<const ForeignModule> modules) {
  return std::any_of(modules.begin(), modules.end(),
                     [](const ForeignModule& module) { return module.spec.has_permutation; });
}

bool LiesInPlanes(int bits) { return bits == 5 || bits == 6; }

/// Brings dense runs of 32 codes, whose words are `stride` apart, into planes.
void ToPlanes(int bits, int64_t stride, std::vector<uint32_t>* words) {
  std::vector<uint32_t> run(static_cast<size_t>(bits));
  std::array<uint8_t, kPlaneRun> codes{};
  const int64_t run_words = bits * stride;
  for (int64_t first = 0; first < static_cast<int64_t>(words->size()); first += run_words) {
    for (int64_t c = 0; c < stride; ++c) {
      uint32_t* const at = words->data() + first + c;
      for (int64_t w = 0; w < bits; ++w) run[static_cast<size_t>(w)] = at[w * stride];
      UnpackDense(reinterpret_cast<const std::byte*>(run.data()), bits, kPlaneRun, codes.data());
      PutPlanes(codes.data(), bits, at, stride);
    }
  }
}

/// The format of a file with these modules.
Result<std::string_view> PackingOf(std::span<const ForeignModule> modules) {
  const auto first_of = [&](const auto& matches) {
    return std::find_if(modules.begin(), modules.end(), [&](const ForeignModule& module) {
      return matches(UnsignedCodesOf(module.spec.format).bits);
    });
  };
  const auto planes = first_of(LiesInPlanes);
  if (planes == modules.end()) return std::string_view("gptq_v2");
  const auto three = first_of([](int bits) { return bits == 3; });
  if (three == modules.end()) return std::string_view("gptq_p");
  return WouldLose(kGptqName,
                   fmt::format("{} of {} beside {} of {}: one file packs both in planes or "
                               "neither",
                               FormatName(three->spec.format), Printable(three->name),
                               FormatName(planes->spec.format), Printable(planes->name)));
}

class GptqWriter final : public ModuleWriter {
 public:
  bool HoldsPermutation() const override { return true; }

  Result<OutputUnit> Plan(const ForeignModule& module) const override {
    const WeightsSpec& spec = module.spec;
    const int bits = UnsignedCodesOf(spec.format).bits;
    MARLIN_RETURN_IF_ERROR(CheckScaledIntegers(kGptqName, spec));
    const int64_t run = 32 % bits == 0 ? 32 / bits : 32;
    if (spec.k % run != 0 || spec.n % run != 0) {
      return CannotHold(kGptqName,
                        fmt::format("[{}, {}], which are no multiples of {}", spec.k, spec.n, run));
    }
    MARLIN_RETURN_IF_ERROR(CheckWholeGroups(kGptqName, spec));
    const int64_t groups = GroupCount(spec);
    return OutputUnit{
        {module.name + ".qweight", DType::kI32, {spec.k * bits / 32, spec.n}},
        {module.name + ".qzeros", DType::kI32, {groups, spec.n * bits / 32}},
        {module.name + ".scales", DType::kF16, {groups, spec.n}},
        {module.name + ".g_idx", DType::kI32, {spec.k}},
    };
  }

  Status Write(const QuantizedWeights& matrix, TensorSink* sink) const override {
    const WeightsSpec& spec = matrix.spec;
    const UnsignedCodes codes = UnsignedCodesOf(spec.format);
    const uint32_t flip = codes.flip * 0x01010101u;
    std::vector<uint32_t> words(matrix.codes.As<uint32_t>(),
                                matrix.codes.As<uint32_t>() + matrix.codes.ElementCount());
    for (uint32_t& word : words) word ^= flip;
    std::vector<int32_t> groups(static_cast<size_t>(spec.k));
    for (int64_t k = 0; k < spec.k; ++k) {
      const int64_t row = spec.has_permutation ? matrix.permutation.As<int32_t>()[k] : k;
      groups[static_cast<size_t>(row)] = static_cast<int32_t>(k / spec.group_size);
    }
    if (spec.has_permutation) {
      const std::span permutation(matrix.permutation.As<int32_t>(), groups.size());
      const std::vector<uint32_t> sorted = words;
      ReorderRows({codes.bits, spec.k, spec.n}, sorted.data(), InverseOf(permutation),
                  words.data());
    }
    MARLIN_ASSIGN_OR_RETURN(const std::vector<uint8_t> zeros, UnsignedZeros(kGptqName, matrix));
    std::vector<uint32_t> packed = PackRuns(zeros, spec.n, codes.bits);
    if (LiesInPlanes(codes.bits)) {
      ToPlanes(codes.bits, spec.n, &words);
      ToPlanes(codes.bits, 1, &packed);
    }
    MARLIN_ASSIGN_OR_RETURN(const std::vector<std::byte> scales,
                            ConvertedParameters(kGptqName, "scale", matrix.scales, DType::kF16));
    MARLIN_RETURN_IF_ERROR(sink->AppendAll(0, words));
    MARLIN_RETURN_IF_ERROR(sink->AppendAll(1, packed));
    MARLIN_RETURN_IF_ERROR(sink->AppendAll(2, scales));
    return sink->AppendAll(3, groups);
  }

  Status Configure(std::span<const ForeignModule> modules, std::span<const std::string> plain,
                   Json* config) const override {
    MARLIN_ASSIGN_OR_RETURN(const std::string_view packing, PackingOf(modules));
    Json quantization = {{"quant_method", "gptq"}, {"checkpoint_format", packing},
                         {"format", packing},      {"desc_act", IsActOrder(modules)},
                         {"pack_dtype", "int32"},  {"lm_head", false}};
    Json dynamic = Json::object();
    for (const std::string& name : plain) dynamic["-:" + Exactly(name)] = Json::object();
    for (const ForeignModule& module : modules) {
      const Json settings = Settings(module);
      if (&module == &modules.front()) {
        quantization.update(settings);
      } else if (settings != Settings(modules.front())) {
        dynamic["+:" + Exactly(module.name)] = settings;
      }
      if (module.name == "lm_head") quantization["lm_head"] = true;
    }
    if (!dynamic.empty()) quantization["dynamic"] = std::move(dynamic);
    (*config)["quantization_config"] = std::move(quantization);
    return {};
  }
};

}  // namespace

MakeWriter MakeGptqWriter;

std::unique_ptr<const ModuleWriter> MakeGptqWriter() { return std::make_unique<GptqWriter>(); }

}  // namespace marlin
