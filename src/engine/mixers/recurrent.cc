#include "engine/mixers/recurrent.h"

#include "base/macros.h"

namespace marlin {

Result<MutableTensorView> ProjectHidden(Pass& pass, int64_t layer, const Projection& projection) {
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView x,
                          pass.arena.Take(pass.products.activations, pass.values.hidden.shape()));
  MARLIN_RETURN_IF_ERROR(NormalizeHidden(pass, pass.layer(layer).input_norm, x));
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView projected,
                          pass.arena.Take(DType::kF32, {pass.rows(), projection.out}));
  MARLIN_RETURN_IF_ERROR(Apply(pass.device, projection, x, pass.products, projected));
  MARLIN_RETURN_IF_ERROR(Ended(pass, StepPart::kQkv));
  return projected;
}

TensorView ConvWeights(const DeviceVector& conv, int64_t channels, int64_t width) {
  return TensorView(conv.view().data(), DType::kF32, {channels, width});
}

MutableTensorView PassTurn::Rows(const MutableTensorView& matrix) const {
  auto* const data = matrix.As<uint8_t>() + first * matrix.stride(0) * DTypeBytes(matrix.dtype());
  return {data,
          matrix.dtype(),
          {rows.positions.dim(0), matrix.dim(1)},
          {stride * matrix.stride(0), matrix.stride(1)}};
}

MutableTensorView PassTurn::Heads(const MutableTensorView& matrix, int64_t heads,
                                  int64_t dim) const {
  const MutableTensorView own = Rows(matrix);
  return {own.data(), own.dtype(), {own.dim(0), heads, dim}, {own.stride(0), dim, 1}};
}

Status ForEachTurn(const Pass& pass, int64_t layer,
                   const std::function<Status(const PassTurn&)>& run) {
  const StepValues& values = pass.values;
  const StepPages& pages = values.pages[pass.pool.GroupOf(layer)];
  if (values.turns.empty()) {
    // Positions say as little of rows that have ended as their tokens do; their samplers do say it.
    const TensorView positions =
        values.advance.tokens.empty() ? values.positions : TensorView(values.advance.state_rows);
    return run({{positions, values.first_rows, pages.block_tables}});
  }
  for (size_t i = 0; i < values.turns.size(); ++i) {
    const RecurrentTurn& turn = values.turns[i];
    MARLIN_RETURN_IF_ERROR(
        run({{turn.positions, turn.first_rows, pages.turns[i]}, turn.first, turn.stride}));
  }
  return {};
}

RecurrentStates StatesOf(const Pass& pass, int64_t layer) {
  return pass.pool.StatesOf(layer, pass.values.pages[pass.pool.GroupOf(layer)].slabs);
}

}  // namespace marlin
