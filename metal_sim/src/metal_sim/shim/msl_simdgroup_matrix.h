// simdgroup_matrix<T, 8, 8>: matrices that the 32 lanes of a simdgroup hold together, two elements
// each, and the functions that load, store and multiply them.
//
// The lanes hold the elements in Apple's observed, undocumented order:
//
//   row = (lane & 16) / 4 + (lane / 2) % 4, columns (lane & 8) / 2 + (lane % 2) * 2 and the next
//
// A product sums in fp32, in the order of k, from the addend on, and is rounded to the type of the
// result at the end; the hardware's order is not documented either.
#pragma once

#include "metal_sim/shim/msl_simdgroup.h"

namespace metal_sim {

inline constexpr int kMatrixSide = 8;
inline constexpr uint64_t kMatrixMultiplyAdds = 512;

constexpr int MatrixRow(uint lane) { return static_cast<int>((lane & 16) / 4 + lane / 2 % 4); }
constexpr int MatrixColumn(uint lane) { return static_cast<int>((lane & 8) / 2 + lane % 2 * 2); }

/// A lane's two elements, neighbours in a row, as functions pass them.
template <typename T>
struct Fragment {
  T first;
  T second;
};

/// A whole matrix, gathered from the lanes.
struct Gathered {
  float elements[kMatrixSide][kMatrixSide];

  template <typename T>
  METAL_SIM_INLINE void Put(uint lane, const Fragment<T>& fragment) {
    elements[MatrixRow(lane)][MatrixColumn(lane)] = static_cast<float>(fragment.first);
    elements[MatrixRow(lane)][MatrixColumn(lane) + 1] = static_cast<float>(fragment.second);
  }
};

template <typename A, typename B, typename C, typename D>
struct Multiplicands {
  Fragment<A> a;
  Fragment<B> b;
  Fragment<C> c;
  Fragment<D> result;

  METAL_SIM_UNINSTRUMENTED static void Multiply(void* const* data, uint32_t, void*) {
    Gathered a, b, sum;
    for (uint lane = 0; lane < kSimdgroupLanes; ++lane) {
      // The simulator reports absent lanes; their elements count as zero.
      const auto* own = static_cast<const Multiplicands*>(data[lane]);
      a.Put(lane, own == nullptr ? Fragment<A>{} : own->a);
      b.Put(lane, own == nullptr ? Fragment<B>{} : own->b);
      sum.Put(lane, own == nullptr ? Fragment<C>{} : own->c);
    }
    for (int row = 0; row < kMatrixSide; ++row) {
      for (int k = 0; k < kMatrixSide; ++k) {
        const float factor = a.elements[row][k];
        for (int column = 0; column < kMatrixSide; ++column) {
          sum.elements[row][column] += factor * b.elements[k][column];
        }
      }
    }
    for (uint lane = 0; lane < kSimdgroupLanes; ++lane) {
      auto* own = static_cast<Multiplicands*>(data[lane]);
      if (own == nullptr) continue;
      const float* at = &sum.elements[MatrixRow(lane)][MatrixColumn(lane)];
      own->result = {static_cast<D>(at[0]), static_cast<D>(at[1])};
    }
    attached_runtime->count_matrix_operation(kMatrixMultiplyAdds);
  }
};

template <typename D, typename A, typename B, typename C>
METAL_SIM_CONVERGENT Fragment<D> MultiplyAdd(Fragment<A> a, Fragment<B> b, Fragment<C> c) {
  Multiplicands<A, B, C, D> published{a, b, c, {}};
  attached_runtime->collective(&published, Multiplicands<A, B, C, D>::Multiply, nullptr,
                               "simdgroup_multiply_accumulate", /*whole=*/true, METAL_SIM_SITE);
  return published.result;
}

}  // namespace metal_sim

namespace metal_sim_program::metal {

/// In Apple's header the vector of all 64 elements, of which a lane holds the first two. Of what
/// such a vector can do, here it takes an index: no vector of two converts to it or from it.
template <typename T>
struct simdgroup_elements {
  METAL_SIM_INLINE T& operator[](uint i) { return element[i]; }
  METAL_SIM_INLINE const T& operator[](uint i) const { return element[i]; }
  T element[2];
};

template <typename T, int kColumns, int kRows>
struct simdgroup_matrix {
  static_assert(kColumns == 8 && kRows == 8, "Metal has simdgroup matrices of 8x8 only");
  static_assert(metal_sim::FloatScalar<T>, "Metal has simdgroup matrices of float types only");

  simdgroup_matrix() = default;

  /// A DIAGONAL matrix; make_filled_simdgroup_matrix fills one.
  METAL_SIM_INLINE explicit simdgroup_matrix(T diagonal) {
    const uint lane = metal_sim::CurrentLane();
    const int distance = metal_sim::MatrixRow(lane) - metal_sim::MatrixColumn(lane);
    elements_[0] = distance == 0 ? diagonal : T(0);
    elements_[1] = distance == 1 ? diagonal : T(0);
  }

  /// The two elements that the current lane holds.
  METAL_SIM_INLINE simdgroup_elements<T>& thread_elements() { return elements_; }
  METAL_SIM_INLINE const simdgroup_elements<T>& thread_elements() const { return elements_; }

 private:
  simdgroup_elements<T> elements_;
};

using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;

template <typename T, int kColumns, int kRows = kColumns>
METAL_SIM_INLINE simdgroup_matrix<T, kColumns, kRows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, kColumns, kRows> result;
  result.thread_elements() = {value, value};
  return result;
}

}  // namespace metal_sim_program::metal

namespace metal_sim {

template <typename T>
METAL_SIM_INLINE Fragment<T> OwnFragment(const metal::simdgroup_matrix<T, 8, 8>& matrix) {
  return {matrix.thread_elements()[0], matrix.thread_elements()[1]};
}

/// Where the current lane's elements lie in memory.
struct Placement {
  size_t first;
  size_t second;
};
METAL_SIM_INLINE Placement PlacementOf(ulong elements_per_row, metal::ulong2 origin,
                                       bool transpose) {
  const uint lane = CurrentLane();
  const auto row = static_cast<size_t>(MatrixRow(lane));
  const auto column = static_cast<size_t>(MatrixColumn(lane));
  const size_t start = origin[1] * elements_per_row + origin[0];
  if (transpose) {
    return {start + column * elements_per_row + row, start + (column + 1) * elements_per_row + row};
  }
  return {start + row * elements_per_row + column, start + row * elements_per_row + column + 1};
}

}  // namespace metal_sim

namespace metal_sim_program::metal {

// Every lane reads and writes its own elements, one by one: ordinary accesses of the kernel.
template <typename T, typename U>
METAL_SIM_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const U* source,
                                     ulong elements_per_row = 8, ulong2 matrix_origin = ulong2(0),
                                     bool transpose_matrix = false) {
  static_assert(std::is_same_v<std::remove_cv_t<U>, T>,
                "simdgroup_load needs memory of the element type");
  const auto at = metal_sim::PlacementOf(elements_per_row, matrix_origin, transpose_matrix);
  matrix.thread_elements()[0] = source[at.first];
  matrix.thread_elements()[1] = source[at.second];
}

template <typename T, typename U>
METAL_SIM_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& matrix, U* destination,
                                      ulong elements_per_row = 8, ulong2 matrix_origin = ulong2(0),
                                      bool transpose_matrix = false) {
  static_assert(std::is_same_v<std::remove_cv_t<U>, T>,
                "simdgroup_store needs memory of the element type");
  const auto at = metal_sim::PlacementOf(elements_per_row, matrix_origin, transpose_matrix);
  destination[at.first] = matrix.thread_elements()[0];
  destination[at.second] = matrix.thread_elements()[1];
}

/// d = a * b + c
template <typename D, typename A, typename B, typename C>
METAL_SIM_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                                    const simdgroup_matrix<A, 8, 8>& a,
                                                    const simdgroup_matrix<B, 8, 8>& b,
                                                    const simdgroup_matrix<C, 8, 8>& c) {
  const auto result = metal_sim::MultiplyAdd<D>(
      metal_sim::OwnFragment(a), metal_sim::OwnFragment(b), metal_sim::OwnFragment(c));
  d.thread_elements() = {D(result.first), D(result.second)};
}

/// d = a * b
template <typename D, typename A, typename B>
METAL_SIM_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d,
                                         const simdgroup_matrix<A, 8, 8>& a,
                                         const simdgroup_matrix<B, 8, 8>& b) {
  const auto result = metal_sim::MultiplyAdd<D>(
      metal_sim::OwnFragment(a), metal_sim::OwnFragment(b), metal_sim::Fragment<float>{0, 0});
  d.thread_elements() = {D(result.first), D(result.second)};
}

template <typename T>
METAL_SIM_INLINE simdgroup_matrix<T, 8, 8> operator*(const simdgroup_matrix<T, 8, 8>& a,
                                                     const simdgroup_matrix<T, 8, 8>& b) {
  simdgroup_matrix<T, 8, 8> result;
  simdgroup_multiply(result, a, b);
  return result;
}

}  // namespace metal_sim_program::metal
