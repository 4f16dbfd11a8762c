// Part of type_check.h: the collective functions of a simdgroup, and its matrices.
#pragma once

#include "metal_sim/shim/type_check_library.h"

namespace metal_sim_program::metal {

#define METAL_SIM_DECLARE_SHUFFLE(NAME) \
  template <typename T>                 \
  T NAME(T data, ushort argument);
#define METAL_SIM_DECLARE_FILL(NAME) \
  template <typename T>              \
  T NAME(T data, T filling, ushort delta, ushort modulo = 32);
#define METAL_SIM_DECLARE_GROUP(PREFIX)                   \
  METAL_SIM_DECLARE_1(PREFIX##_sum)                       \
  METAL_SIM_DECLARE_1(PREFIX##_product)                   \
  METAL_SIM_DECLARE_1(PREFIX##_min)                       \
  METAL_SIM_DECLARE_1(PREFIX##_max)                       \
  METAL_SIM_DECLARE_1(PREFIX##_and)                       \
  METAL_SIM_DECLARE_1(PREFIX##_or)                        \
  METAL_SIM_DECLARE_1(PREFIX##_xor)                       \
  METAL_SIM_DECLARE_1(PREFIX##_prefix_inclusive_sum)      \
  METAL_SIM_DECLARE_1(PREFIX##_prefix_exclusive_sum)      \
  METAL_SIM_DECLARE_1(PREFIX##_prefix_inclusive_product)  \
  METAL_SIM_DECLARE_1(PREFIX##_prefix_exclusive_product)  \
  METAL_SIM_DECLARE_1(PREFIX##_broadcast_first)           \
  METAL_SIM_DECLARE_SHUFFLE(PREFIX##_broadcast)           \
  METAL_SIM_DECLARE_SHUFFLE(PREFIX##_shuffle)             \
  METAL_SIM_DECLARE_SHUFFLE(PREFIX##_shuffle_xor)         \
  METAL_SIM_DECLARE_SHUFFLE(PREFIX##_shuffle_up)          \
  METAL_SIM_DECLARE_SHUFFLE(PREFIX##_shuffle_down)        \
  METAL_SIM_DECLARE_SHUFFLE(PREFIX##_shuffle_rotate_up)   \
  METAL_SIM_DECLARE_SHUFFLE(PREFIX##_shuffle_rotate_down) \
  METAL_SIM_DECLARE_FILL(PREFIX##_shuffle_and_fill_up)    \
  METAL_SIM_DECLARE_FILL(PREFIX##_shuffle_and_fill_down)  \
  bool PREFIX##_all(bool expression);                     \
  bool PREFIX##_any(bool expression);                     \
  bool PREFIX##_is_first();

METAL_SIM_DECLARE_GROUP(simd)
METAL_SIM_DECLARE_GROUP(quad)

struct simd_vote {
  explicit simd_vote(ulong votes);
  explicit operator ulong() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool expression);
simd_vote simd_active_threads_mask();

/// Apple's is the vector of all 64 elements, of which a lane holds the first two.
template <typename T>
struct simdgroup_elements {
  __private T& operator[](int i) const;
  T element[2];
};

template <typename T, int kColumns, int kRows>
struct simdgroup_matrix {
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  __private simdgroup_elements<T>& thread_elements() const;

 private:
  simdgroup_elements<T> elements_;
};

using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;

template <typename T, int kColumns, int kRows = kColumns>
simdgroup_matrix<T, kColumns, kRows> make_filled_simdgroup_matrix(T value);

// Memory of a simdgroup's matrices is device or threadgroup memory; a thread's own is refused.
#define METAL_SIM_DECLARE_MEMORY(SPACE)                                                   \
  template <typename T>                                                                   \
  void simdgroup_load(__private simdgroup_matrix<T, 8, 8>& matrix, SPACE const T* source, \
                      ulong elements_per_row = 8, ulong2 matrix_origin = (ulong2)(0, 0),  \
                      bool transpose_matrix = false);                                     \
  template <typename T>                                                                   \
  void simdgroup_store(simdgroup_matrix<T, 8, 8> matrix, SPACE T* destination,            \
                       ulong elements_per_row = 8, ulong2 matrix_origin = (ulong2)(0, 0), \
                       bool transpose_matrix = false);

METAL_SIM_DECLARE_MEMORY(__global)
METAL_SIM_DECLARE_MEMORY(__local)

template <typename D, typename A, typename B, typename C>
void simdgroup_multiply_accumulate(__private simdgroup_matrix<D, 8, 8>& d,
                                   simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
                                   simdgroup_matrix<C, 8, 8> c);
template <typename D, typename A, typename B>
void simdgroup_multiply(__private simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                        simdgroup_matrix<B, 8, 8> b);
template <typename T>
simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b);

}  // namespace metal_sim_program::metal

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT __FLT_MAX__
