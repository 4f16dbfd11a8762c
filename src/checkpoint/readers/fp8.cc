// quant_method "fp8" of DeepSeek and others: X.weight f8_e4m3 [n, k] with X.weight_scale_inv (or
// X.scale), which multiplies despite its name, one number per block of weight_block_size. Routed
// experts of DeepSeek-V4 are FP4 packed in i8 [n, k / 2], the low nibble first, with exponents
// [n, k / 32] as X.scale.
#include <fmt/core.h>

#include <array>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/codes/row_weights.h"
#include "recipe/model_config.h"

namespace marlin {
namespace {

constexpr std::array<std::string_view, 3> kScaleSuffixes = {".weight_scale_inv", ".scale",
                                                            ".weight_scale"};

Status AddPackedFp4(ModuleTensorFinder* finder, std::string_view suffix, ListedReader* reader) {
  MARLIN_ASSIGN_OR_RETURN(const size_t codes,
                          finder->Need(ModulePart::kCodes, ".weight", {DType::kI8, DType::kU8}));
  const Shape& shape = finder->ShapeOf(codes);
  if (shape.rank() != 2 || shape.ElementCount() < 1 || shape[1] % (kMxGroup / 2) != 0) {
    return finder->Malformed(
        ".weight", "expected [n, k / 2] with k a multiple of 32, got " + shape.ToString());
  }
  MARLIN_ASSIGN_OR_RETURN(const size_t scales,
                          finder->Need(ModulePart::kScales, suffix, {DType::kF8E8M0, DType::kU8},
                                       {shape[0], shape[1] / (kMxGroup / 2)}));
  RowWeights rows;
  rows.codes = codes;
  rows.scales = scales;
  rows.spec = {.format = Format::kFp4E2M1,
               .k = shape[1] * 2,
               .n = shape[0],
               .group_size = kMxGroup,
               .scale_type = ScaleType::kE8M0};
  AddRows(finder->base() + ".weight", std::move(rows), finder, reader);
  return {};
}

/// Scales for every `rows` and `columns` of a matrix; 0: for the whole.
Status AddFp8Modules(TensorStore& store, int64_t rows, int64_t columns, ListedReader* reader) {
  for (const std::string_view suffix : kScaleSuffixes) {
    for (const std::string& base : BasesWithSuffix(store, suffix)) {
      ModuleTensorFinder finder(store, base);
      const TensorInfo* weight = finder.Look(".weight");
      if (weight == nullptr) return finder.Malformed(".weight", "is missing");
      finder.TakeUnused({".input_scale", ".activation_scale"});
      const bool packed = weight->dtype == DType::kI8 || weight->dtype == DType::kU8;
      MARLIN_RETURN_IF_ERROR(
          packed ? AddPackedFp4(&finder, suffix, reader)
                 : AddFp8(base + ".weight", ".weight", suffix, rows, columns, &finder, reader));
    }
  }
  // Fused experts have no ".weight" in their name.
  for (const std::string& base : BasesWithSuffix(store, "_scale_inv")) {
    if (base.ends_with(".weight")) continue;
    ModuleTensorFinder finder(store, base);
    MARLIN_RETURN_IF_ERROR(AddFp8(base, "", "_scale_inv", rows, columns, &finder, reader));
  }
  return {};
}

}  // namespace

OpenReader OpenFp8;

Result<std::unique_ptr<const ModuleReader>> OpenFp8(TensorStore& store, const QuantMethod& method) {
  ModelConfig json = ModelConfig::Of(*method.config, method.where);
  const std::vector<int64_t> block = json.IntegersOrEmpty("weight_block_size");
  const std::string encoding = json.StringOr("fmt", "e4m3");
  MARLIN_RETURN_IF_ERROR(json.status());
  const bool whole = block.empty();
  if (!whole && (block.size() != 2 || block[0] < 1 || block[1] < 1)) {
    return Status(Code::kMalformedFile,
                  method.where + ": weight_block_size: expected two positive numbers");
  }
  if (encoding != "e4m3" && encoding != "e5m2" && encoding != "float8_e4m3fn") {
    return Status(Code::kUnsupported, fmt::format("{}: fmt \"{}\" is not supported; supported: "
                                                  "e4m3, e5m2",
                                                  method.where, Printable(encoding)));
  }
  const int64_t rows = whole ? 0 : block[0];
  const int64_t columns = whole ? 0 : block[1];
  return ListedReader::Open(
      store, [&](ListedReader* reader) { return AddFp8Modules(store, rows, columns, reader); });
}

}  // namespace marlin
