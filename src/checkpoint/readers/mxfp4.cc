// MXFP4 of gpt-oss: fused experts X as X_blocks u8 [experts, n, k / 32, 16], the low nibble of a
// byte first, and X_scales u8 [experts, n, k / 32], exponents. Gate and up rows alternate, as in
// the unquantized checkpoint, whose X is [experts, k, n].
#include <fmt/core.h>

#include "base/macros.h"
#include "checkpoint/codes/row_weights.h"
#include "checkpoint/module_names.h"

namespace marlin {
namespace {

constexpr int64_t kGroup = 32;

Status AddModule(const TensorStore& store, const std::string& base, ListedReader* reader) {
  ModuleTensorFinder finder(store, base);
  MARLIN_ASSIGN_OR_RETURN(const size_t codes,
                          finder.Need(ModulePart::kCodes, "_blocks", {DType::kU8}));
  const Shape& shape = finder.ShapeOf(codes);
  if (shape.rank() != 4 || shape[3] != kGroup / 2 || shape.ElementCount() < 1) {
    return finder.Malformed("_blocks",
                            "expected [experts, n, k / 32, 16], got " + shape.ToString());
  }
  MARLIN_ASSIGN_OR_RETURN(const size_t scales,
                          finder.Need(ModulePart::kScales, "_scales", {DType::kU8, DType::kF8E8M0},
                                      {shape[0], shape[1], shape[2]}));
  RowWeights rows;
  rows.codes = codes;
  rows.scales = scales;
  rows.layout = SourceLayout::kInOut;
  rows.spec = {.format = Format::kFp4E2M1,
               .experts = shape[0],
               .k = shape[2] * kGroup,
               .n = shape[1],
               .group_size = kGroup,
               .scale_type = ScaleType::kE8M0};
  AddRows(PlainWeightName(Producer::kHuggingFace, base, true), std::move(rows), &finder, reader);
  return {};
}

}  // namespace

OpenReader OpenMxfp4;

Result<std::unique_ptr<const ModuleReader>> OpenMxfp4(TensorStore& store,
                                                      const QuantMethod& /*method*/) {
  return ListedReader::Open(store, [&](ListedReader* reader) -> Status {
    for (const std::string& base : BasesWithSuffix(store, "_blocks")) {
      MARLIN_RETURN_IF_ERROR(AddModule(store, base, reader));
    }
    return {};
  });
}

}  // namespace marlin
