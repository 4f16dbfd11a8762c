#include "backends/metal/metal_decoder.h"

#include <algorithm>

#include "backends/metal/gemm/row_parts.h"
#include "base/macros.h"

namespace marlin::metal {

bool MetalDecoder::Takes(const RouteTokensCall& call) const {
  return FitsRouter(call.options, call.logits.dim(1));
}

Status MetalDecoder::Run(const RouteTokensCall& call, const OperationContext& context) const {
  if (!Takes(call)) {
    return Status(Code::kUnsupported, "router: too large, or with options that this device lacks");
  }
  const int64_t experts = call.logits.dim(1);
  const auto launch = [&](const RouterRows& rows, ErrorWords::Word* error) {
    return RouteTokensLaunch(call, rows, error, sizeof(*error));
  };
  return RunParts(call.logits.dim(0), MostRouterRows(experts), experts, context.stream, launch);
}

bool MetalDecoder::RoutesRows(const RouteRowsCall& call) const { return FitsFusedRouter(call); }

Status MetalDecoder::RouteRows(const RouteRowsCall& call, const OperationContext& context) const {
  GemmDesc product;
  product.m = call.x.dim(0);
  product.n = call.matrix.spec.n;
  product.k = call.matrix.spec.k;
  const auto launch = [&](const RouterRows& rows, ErrorWords::Word* error) {
    return RouteRowsLaunch(call, rows, error, sizeof(*error));
  };
  const int64_t rows = std::min(RowsOfPart(product), MostRouterRows(product.n));
  return RunParts(product.m, rows, product.n, context.stream, launch);
}

Status MetalDecoder::RunParts(int64_t count, int64_t rows_of_part, int64_t experts, void* stream,
                              const MakeLaunch& launch) const {
  for (int64_t first = 0; first < count; first += rows_of_part) {
    const RouterRows rows{first, std::min(rows_of_part, count - first)};
    MARLIN_ASSIGN_OR_RETURN(const std::shared_ptr<ErrorWords::Word> error, errors_->Take());
    error->selection = static_cast<int32_t>(kNoRouterError);
    const KernelLaunch part = launch(rows, error.get());
    const auto check = [error, rows, experts] {
      return RouterError(static_cast<uint32_t>(error->selection), rows, experts);
    };
    MARLIN_RETURN_IF_ERROR(driver_.RunAndCheck({&part, 1}, stream, check));
  }
  return Status();
}

}  // namespace marlin::metal
