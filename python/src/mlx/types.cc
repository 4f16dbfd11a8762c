#include "mlx/types.h"

#include <mlx/ops.h>
#include <mlx/stream.h>
#include <mlx/utils.h>

#include <limits>
#include <stdexcept>

namespace marlin::python {

namespace mx = mlx::core;

mx::array AsIds(const mx::array& ids, mx::Stream stream) {
  if (ids.dtype() == mx::uint32) return mx::view(ids, mx::int32, stream);
  if (mx::size_of(ids.dtype()) < 4 || ids.dtype() == mx::int32) {
    return mx::astype(ids, mx::int32, stream);
  }
  const mx::array most(std::numeric_limits<int32_t>::max(), ids.dtype());
  mx::array narrow = mx::minimum(ids, most, stream);
  if (ids.dtype() == mx::int64) {
    narrow = mx::maximum(narrow, mx::array(int64_t{-1}, mx::int64), stream);
  }
  return mx::astype(narrow, mx::int32, stream);
}

void CheckIds(const mx::array& ids, int64_t count, mx::Stream stream) {
  mx::synchronize(stream);
  const int32_t* const values = ids.data<int32_t>();
  for (size_t i = 0; i < ids.size(); ++i) {
    if (values[i] >= 0 && values[i] < count) continue;
    throw std::runtime_error("metal_marlin: id " + std::to_string(values[i]) + " at " +
                             std::to_string(i) + ", which is not in 0.." +
                             std::to_string(count - 1));
  }
}

void CheckRows(const mx::array& x, int64_t k) {
  if (!IsFloat(x.dtype())) {
    throw std::invalid_argument("x: expected float32, float16 or bfloat16");
  }
  if (x.ndim() < 1 || x.shape(-1) != k) {
    throw std::invalid_argument("x: expected [..., " + std::to_string(k) + "], got " +
                                ShapeText(x.shape()));
  }
}

}  // namespace marlin::python
