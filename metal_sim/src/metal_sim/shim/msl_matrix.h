// matrix<T, columns, rows>, floatCxR and halfCxR: columns of vectors. Not the matrices of
// simdgroups (msl_simdgroup_matrix.h).
#pragma once

#include "metal_sim/shim/msl_math.h"

namespace metal_sim_program::metal {

template <metal_sim::FloatScalar T, int kColumns, int kRows>
struct matrix {
  using Column = vec<T, kRows>;
  Column columns[kColumns];

  matrix() = default;

  /// A diagonal matrix.
  template <metal_sim::Scalar U>
  METAL_SIM_INLINE constexpr explicit matrix(U diagonal) {
    for (int c = 0; c < kColumns; ++c) {
      for (int r = 0; r < kRows; ++r) columns[c][r] = r == c ? static_cast<T>(diagonal) : T(0);
    }
  }

  template <metal_sim::Vector... Columns>
  requires(sizeof...(Columns) == kColumns &&
           ((metal_sim::kCount<Columns> == kRows) && ...)) METAL_SIM_INLINE
      constexpr matrix(const Columns&... values) {
    int next = 0;
    ((columns[next++] = Column(values)), ...);
  }

  /// All elements, column by column.
  template <metal_sim::Scalar... Elements>
  requires(sizeof...(Elements) == kColumns * kRows) METAL_SIM_INLINE
      constexpr matrix(const Elements&... values) {
    int next = 0;
    ((columns[next / kRows][next % kRows] = static_cast<T>(values), ++next), ...);
  }

  template <metal_sim::FloatScalar U>
  requires(!std::is_same_v<T, U>) METAL_SIM_INLINE
      constexpr explicit matrix(const matrix<U, kColumns, kRows>& other) {
    for (int c = 0; c < kColumns; ++c) columns[c] = Column(other.columns[c]);
  }

  METAL_SIM_INLINE constexpr Column& operator[](size_t index) { return columns[index]; }
  METAL_SIM_INLINE constexpr const Column& operator[](size_t index) const { return columns[index]; }

  METAL_SIM_INLINE constexpr matrix& operator+=(const matrix& other) {
    for (int c = 0; c < kColumns; ++c) columns[c] += other.columns[c];
    return *this;
  }
  METAL_SIM_INLINE constexpr matrix& operator-=(const matrix& other) {
    for (int c = 0; c < kColumns; ++c) columns[c] -= other.columns[c];
    return *this;
  }
  METAL_SIM_INLINE constexpr matrix& operator*=(T factor) {
    for (int c = 0; c < kColumns; ++c) columns[c] *= factor;
    return *this;
  }
  METAL_SIM_INLINE constexpr matrix& operator*=(const matrix<T, kColumns, kColumns>& right) {
    return *this = *this * right;
  }

  friend METAL_SIM_INLINE constexpr matrix operator+(matrix left, const matrix& right) {
    return left += right;
  }
  friend METAL_SIM_INLINE constexpr matrix operator-(matrix left, const matrix& right) {
    return left -= right;
  }
  friend METAL_SIM_INLINE constexpr matrix operator-(matrix operand) { return operand *= T(-1); }
  friend METAL_SIM_INLINE constexpr matrix operator*(matrix left, T right) { return left *= right; }
  friend METAL_SIM_INLINE constexpr matrix operator*(T left, matrix right) { return right *= left; }

  friend METAL_SIM_INLINE constexpr vec<T, kRows> operator*(const matrix& left,
                                                            const vec<T, kColumns>& right) {
    vec<T, kRows> result = left.columns[0] * right[0];
    for (int c = 1; c < kColumns; ++c) result += left.columns[c] * right[c];
    return result;
  }
  friend METAL_SIM_INLINE constexpr vec<T, kColumns> operator*(const vec<T, kRows>& left,
                                                               const matrix& right) {
    vec<T, kColumns> result;
    for (int c = 0; c < kColumns; ++c) result[c] = dot(left, right.columns[c]);
    return result;
  }

  friend METAL_SIM_INLINE constexpr bool operator==(const matrix& left, const matrix& right) {
    bool equal = true;
    for (int c = 0; c < kColumns; ++c) equal &= all(left.columns[c] == right.columns[c]);
    return equal;
  }
};

template <typename T, int kInner, int kRows, int kColumns>
METAL_SIM_INLINE constexpr matrix<T, kColumns, kRows> operator*(
    const matrix<T, kInner, kRows>& left, const matrix<T, kColumns, kInner>& right) {
  matrix<T, kColumns, kRows> result;
  for (int c = 0; c < kColumns; ++c) result[c] = left * right[c];
  return result;
}

template <typename T, int kColumns, int kRows>
METAL_SIM_INLINE constexpr matrix<T, kRows, kColumns> transpose(
    const matrix<T, kColumns, kRows>& operand) {
  matrix<T, kRows, kColumns> result;
  for (int c = 0; c < kColumns; ++c) {
    for (int r = 0; r < kRows; ++r) result[r][c] = operand[c][r];
  }
  return result;
}

template <typename T>
METAL_SIM_INLINE constexpr T determinant(const matrix<T, 2, 2>& m) {
  return m[0][0] * m[1][1] - m[1][0] * m[0][1];
}
template <typename T>
METAL_SIM_INLINE constexpr T determinant(const matrix<T, 3, 3>& m) {
  return dot(m[0], cross(m[1], m[2]));
}
template <typename T>
METAL_SIM_INLINE constexpr T determinant(const matrix<T, 4, 4>& m) {
  // Along the first column.
  T result = 0;
  for (int row = 0; row < 4; ++row) {
    matrix<T, 3, 3> rest;
    for (int c = 1; c < 4; ++c) {
      for (int r = 0; r < 3; ++r) rest[c - 1][r] = m[c][r < row ? r : r + 1];
    }
    const T part = m[0][row] * determinant(rest);
    result = row % 2 == 0 ? result + part : result - part;
  }
  return result;
}

}  // namespace metal_sim_program::metal

#define METAL_SIM_MATRIX_NAME(T, C, R) \
  namespace metal_sim_program::metal { \
  using T##C##x##R = matrix<T, C, R>;  \
  }                                    \
  using metal::T##C##x##R;
#define METAL_SIM_MATRIX_NAMES(T) \
  METAL_SIM_MATRIX_NAME(T, 2, 2)  \
  METAL_SIM_MATRIX_NAME(T, 2, 3)  \
  METAL_SIM_MATRIX_NAME(T, 2, 4)  \
  METAL_SIM_MATRIX_NAME(T, 3, 2)  \
  METAL_SIM_MATRIX_NAME(T, 3, 3)  \
  METAL_SIM_MATRIX_NAME(T, 3, 4)  \
  METAL_SIM_MATRIX_NAME(T, 4, 2)  \
  METAL_SIM_MATRIX_NAME(T, 4, 3)  \
  METAL_SIM_MATRIX_NAME(T, 4, 4)

METAL_SIM_MATRIX_NAMES(float)
METAL_SIM_MATRIX_NAMES(half)

#undef METAL_SIM_MATRIX_NAMES
#undef METAL_SIM_MATRIX_NAME
