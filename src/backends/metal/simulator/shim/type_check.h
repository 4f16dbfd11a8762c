// Checks address spaces: Metal sources compiled with this header and
//
//   clang++-19 -x clcpp -cl-std=clc++2021 -fsyntax-only -cl-single-precision-constant
//
// see clang's own vectors and device, constant, threadgroup and thread as separate address spaces,
// so a pointer that crosses them is an error. Declarations alone: nothing here runs. Not part of
// msl.h, which knows one address space.
#pragma once

#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable

#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private
#define kernel
#define METAL_FUNC inline

using uint8_t = uchar;
using uint16_t = ushort;
using uint32_t = uint;
using uint64_t = ulong;
using int8_t = char;
using int16_t = short;
using int32_t = int;
using int64_t = long;

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
mem_flags operator|(mem_flags left, mem_flags right);
void threadgroup_barrier(mem_flags flags);
void simdgroup_barrier(mem_flags flags);

// Functions of elements: the operands' type.
#define METAL_SIM_DECLARE_1(NAME) \
  template <typename T>           \
  T NAME(T x);
#define METAL_SIM_DECLARE_2(NAME) \
  template <typename T>           \
  T NAME(T x, T y);
#define METAL_SIM_DECLARE_3(NAME) \
  template <typename T>           \
  T NAME(T x, T y, T z);

METAL_SIM_DECLARE_1(abs)
METAL_SIM_DECLARE_1(ceil)
METAL_SIM_DECLARE_1(clz)
METAL_SIM_DECLARE_1(ctz)
METAL_SIM_DECLARE_1(exp)
METAL_SIM_DECLARE_1(exp2)
METAL_SIM_DECLARE_1(fabs)
METAL_SIM_DECLARE_1(floor)
METAL_SIM_DECLARE_1(log)
METAL_SIM_DECLARE_1(log2)
METAL_SIM_DECLARE_1(popcount)
METAL_SIM_DECLARE_1(reverse_bits)
METAL_SIM_DECLARE_1(rint)
METAL_SIM_DECLARE_1(round)
METAL_SIM_DECLARE_1(rsqrt)
METAL_SIM_DECLARE_1(saturate)
METAL_SIM_DECLARE_1(sign)
METAL_SIM_DECLARE_1(sqrt)
METAL_SIM_DECLARE_1(tanh)
METAL_SIM_DECLARE_1(trunc)
METAL_SIM_DECLARE_2(fmax)
METAL_SIM_DECLARE_2(fmin)
METAL_SIM_DECLARE_2(fmod)
METAL_SIM_DECLARE_2(max)
METAL_SIM_DECLARE_2(min)
METAL_SIM_DECLARE_2(mulhi)
METAL_SIM_DECLARE_2(pow)
METAL_SIM_DECLARE_2(powr)
METAL_SIM_DECLARE_2(rotate)
METAL_SIM_DECLARE_3(clamp)
METAL_SIM_DECLARE_3(fma)
METAL_SIM_DECLARE_3(mad24)
METAL_SIM_DECLARE_3(mix)
METAL_SIM_DECLARE_1(simd_sum)
METAL_SIM_DECLARE_1(simd_product)
METAL_SIM_DECLARE_1(simd_min)
METAL_SIM_DECLARE_1(simd_max)
METAL_SIM_DECLARE_1(simd_and)
METAL_SIM_DECLARE_1(simd_or)
METAL_SIM_DECLARE_1(simd_xor)
METAL_SIM_DECLARE_1(simd_prefix_inclusive_sum)
METAL_SIM_DECLARE_1(simd_prefix_exclusive_sum)
METAL_SIM_DECLARE_1(simd_broadcast_first)
METAL_SIM_DECLARE_1(quad_sum)
METAL_SIM_DECLARE_1(quad_max)
METAL_SIM_DECLARE_1(quad_min)

#undef METAL_SIM_DECLARE_1
#undef METAL_SIM_DECLARE_2
#undef METAL_SIM_DECLARE_3

#define METAL_SIM_DECLARE_SHUFFLE(NAME) \
  template <typename T>                 \
  T NAME(T data, ushort argument);

METAL_SIM_DECLARE_SHUFFLE(simd_broadcast)
METAL_SIM_DECLARE_SHUFFLE(simd_shuffle)
METAL_SIM_DECLARE_SHUFFLE(simd_shuffle_xor)
METAL_SIM_DECLARE_SHUFFLE(simd_shuffle_up)
METAL_SIM_DECLARE_SHUFFLE(simd_shuffle_down)
METAL_SIM_DECLARE_SHUFFLE(quad_shuffle_xor)
METAL_SIM_DECLARE_SHUFFLE(quad_broadcast)

#undef METAL_SIM_DECLARE_SHUFFLE

bool simd_all(bool expression);
bool simd_any(bool expression);
bool simd_is_first();

template <typename T, int kColumns, int kRows>
struct simdgroup_matrix {
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  __private vec<T, 2>& thread_elements();
};

template <typename T, int kColumns, int kRows>
simdgroup_matrix<T, kColumns, kRows> make_filled_simdgroup_matrix(T value);

// Memory of a simdgroup's matrices is device or threadgroup memory; a thread's own is refused.
#define METAL_SIM_DECLARE_MEMORY(SPACE)                                                         \
  template <typename T>                                                                         \
  void simdgroup_load(__private simdgroup_matrix<T, 8, 8>& matrix, SPACE const T* source,       \
                      ulong elements_per_row = 8, ulong2 matrix_origin = (ulong2)(0, 0),        \
                      bool transpose_matrix = false);                                           \
  template <typename T>                                                                         \
  void simdgroup_store(__private const simdgroup_matrix<T, 8, 8>& matrix, SPACE T* destination, \
                       ulong elements_per_row = 8, ulong2 matrix_origin = (ulong2)(0, 0),       \
                       bool transpose_matrix = false);

METAL_SIM_DECLARE_MEMORY(__global)
METAL_SIM_DECLARE_MEMORY(__local)

#undef METAL_SIM_DECLARE_MEMORY

template <typename D, typename A, typename B, typename C>
void simdgroup_multiply_accumulate(__private simdgroup_matrix<D, 8, 8>& d,
                                   __private const simdgroup_matrix<A, 8, 8>& a,
                                   __private const simdgroup_matrix<B, 8, 8>& b,
                                   __private const simdgroup_matrix<C, 8, 8>& c);
template <typename D, typename A, typename B>
void simdgroup_multiply(__private simdgroup_matrix<D, 8, 8>& d,
                        __private const simdgroup_matrix<A, 8, 8>& a,
                        __private const simdgroup_matrix<B, 8, 8>& b);

}  // namespace metal

template <typename To, typename From>
To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_astype(value, To);
}
