// MLX's element types and shapes, for the primitives.
#pragma once

#include <mlx/array.h>

#include <cstdint>
#include <string>

#include "marlin/tensor.h"

namespace marlin::python {

inline bool IsFloat(mlx::core::Dtype type) {
  namespace mx = mlx::core;
  return type == mx::float32 || type == mx::float16 || type == mx::bfloat16;
}

/// Precondition: IsFloat.
inline DType TypeOf(mlx::core::Dtype type) {
  if (type == mlx::core::bfloat16) return DType::kBf16;
  return type == mlx::core::float16 ? DType::kF16 : DType::kF32;
}

inline std::string ShapeText(const mlx::core::Shape& shape) {
  std::string text;
  for (const auto dim : shape) text += (text.empty() ? "" : ", ") + std::to_string(dim);
  return "[" + text + "]";
}

/// Integers as int32: one of more bits does not become another id that is right.
mlx::core::array AsIds(const mlx::core::array& ids, mlx::core::Stream stream);

/// Waits until a stream of the CPU has computed `ids` (int32, contiguous) and throws
/// std::runtime_error for one that is not in [0, count). Call it where MLX evaluates: a task
/// of a stream must not throw, because MLX drops the count of the tasks after it, and an
/// evaluation then waits for them forever (0.32.4).
void CheckIds(const mlx::core::array& ids, int64_t count, mlx::core::Stream stream);

/// Throws std::invalid_argument unless x is [..., k] of a floating-point type.
void CheckRows(const mlx::core::array& x, int64_t k);

}  // namespace marlin::python
