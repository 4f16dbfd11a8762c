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

RecurrentRows RecurrentRowsOf(const Pass& pass, int64_t layer) {
  const StepValues& values = pass.values;
  RecurrentRows rows;
  // Positions say as little of rows that have ended as their tokens do; their samplers do say it.
  rows.positions =
      values.advance.tokens.empty() ? values.positions : TensorView(values.advance.state_rows);
  rows.first_rows = values.first_rows;
  rows.pages = values.pages[pass.pool.GroupOf(layer)].block_tables;
  return rows;
}

RecurrentStates StatesOf(const Pass& pass, int64_t layer) {
  return pass.pool.StatesOf(layer, pass.values.pages[pass.pool.GroupOf(layer)].slabs);
}

}  // namespace marlin
