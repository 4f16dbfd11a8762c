#include "engine/mixers/recurrent.h"

namespace marlin {

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
