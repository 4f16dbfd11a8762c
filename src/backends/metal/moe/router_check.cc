#include "backends/metal/moe/router_check.h"

#include <fmt/core.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "base/macros.h"
#include "base/scalars.h"
#include "plan/step/decoder_backend.h"
#include "plan/step/decoder_calls.h"

namespace marlin::metal {
namespace {

// Three groups of three experts. One expert of each group has the larger logit; the choice bias
// excludes the middle group, so that two experts are selected whose weights are equal.
constexpr int64_t kRoutedTokens = 3;
constexpr int64_t kRoutedGroups = 3;
constexpr int64_t kRoutedGroupSize = 3;
constexpr int64_t kRoutedExperts = kRoutedGroups * kRoutedGroupSize;
constexpr int64_t kRoutedTopK = 2;

/// The place of the larger logit in a group.
int64_t PlaceInGroup(int64_t token) { return (2 * token + 1) % kRoutedGroupSize; }

float RouterLogit(int64_t token, int64_t expert) {
  return expert % kRoutedGroupSize == PlaceInGroup(token) ? 2.0F : -2.0F;
}

/// The operands in memory that host and device share.
struct RouterOperands {
  float x[kRoutedTokens *
          kRoutedTokens];  ///< The identity, so that row t of the matrix is the logits of t.
  float logits[kRoutedTokens * kRoutedExperts];
  float choice_bias[kRoutedExperts];
  int32_t ids[kRoutedTokens * kRoutedTopK];
  float weights[kRoutedTokens * kRoutedTopK];
};

void FillRouter(RouterOperands* operands) {
  for (int64_t t = 0; t < kRoutedTokens; ++t) {
    for (int64_t i = 0; i < kRoutedTokens; ++i)
      operands->x[t * kRoutedTokens + i] = i == t ? 1.0F : 0.0F;
    for (int64_t e = 0; e < kRoutedExperts; ++e) {
      operands->logits[t * kRoutedExperts + e] = RouterLogit(t, e);
    }
  }
  for (int64_t e = 0; e < kRoutedExperts; ++e) {
    operands->choice_bias[e] = e / kRoutedGroupSize == 1 ? -1.0F : 0.0F;
  }
}

/// Compares the selections, and forgets them.
Status CompareSelections(std::string_view kernel, RouterOperands* operands) {
  for (int64_t i = 0; i < kRoutedTokens * kRoutedTopK; ++i) {
    const int64_t group = i % kRoutedTopK == 0 ? 0 : kRoutedGroups - 1;
    const int64_t expected = group * kRoutedGroupSize + PlaceInGroup(i / kRoutedTopK);
    const int32_t id = operands->ids[i];
    const float weight = operands->weights[i];
    operands->ids[i] = -1;
    operands->weights[i] = -1.0F;
    if (id == expected && weight == 0.5F) continue;
    return Status(Code::kUnsupported,
                  fmt::format("self-test: {}: token {}, selection {} is {} with {}, expected {} "
                              "with 0.5",
                              kernel, i / kRoutedTopK, i % kRoutedTopK, id, weight, expected));
  }
  return Status();
}

Status CheckBothRouters(const Backend& backend, RouterOperands* operands) {
  const DecoderBackend& decoder = *backend.decoder();
  RouterOptions options;
  options.top_k = kRoutedTopK;
  options.scoring = RouterOptions::Scoring::kSigmoid;
  options.groups = kRoutedGroups;
  options.top_groups = kRoutedGroups - 1;
  options.choice_bias = TensorView(operands->choice_bias, DType::kF32, {kRoutedExperts});
  const Shape selections{kRoutedTokens, kRoutedTopK};
  const MutableTensorView ids(operands->ids, DType::kI32, selections);
  const MutableTensorView weights(operands->weights, DType::kF32, selections);

  const TensorView logits(operands->logits, DType::kF32, {kRoutedTokens, kRoutedExperts});
  MARLIN_RETURN_IF_ERROR(decoder.Run(RouteTokensCall{logits, options, ids, weights}, {}));
  MARLIN_RETURN_IF_ERROR(backend.Synchronize(nullptr));
  MARLIN_RETURN_IF_ERROR(CompareSelections("moe_router_topk", operands));

  std::vector<uint16_t> values;
  for (int64_t i = 0; i < kRoutedTokens * kRoutedExperts; ++i) {
    values.push_back(FloatToBf16(RouterLogit(i / kRoutedExperts, i % kRoutedExperts)));
  }
  QuantizedWeights dense;
  dense.spec.format = Format::kBf16;
  dense.spec.k = kRoutedTokens;
  dense.spec.n = kRoutedExperts;
  dense.codes = TensorView(values.data(), DType::kBf16, {1, kRoutedTokens, kRoutedExperts});
  MARLIN_ASSIGN_OR_RETURN(const auto matrix, backend.Prepare(dense, {}));
  const TensorView x(operands->x, DType::kF32, {kRoutedTokens, kRoutedTokens});
  const RouteRowsCall call{x, *matrix, {}, options, ids, weights};
  MARLIN_RETURN_IF_ERROR(decoder.RouteRows(call, {}));
  MARLIN_RETURN_IF_ERROR(backend.Synchronize(nullptr));
  return CompareSelections("moe_router_topk_fused", operands);
}

}  // namespace

Status CheckRouters(const Backend& backend) {
  MARLIN_ASSIGN_OR_RETURN(void* const memory, backend.Allocate(sizeof(RouterOperands)));
  auto* const operands = static_cast<RouterOperands*>(memory);
  FillRouter(operands);
  Status status = CheckBothRouters(backend, operands);
  backend.Free(memory);
  return status;
}

}  // namespace marlin::metal
