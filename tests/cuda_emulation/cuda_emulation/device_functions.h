// The functions of CUDA's device language that kernels call.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cuda_emulation/runtime.h"

using std::isfinite;
using std::isinf;
using std::isnan;

template <typename A, typename B>
requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
constexpr auto min(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<C>)
    return std::fmin(C(a), C(b));
  else
    return C(a) < C(b) ? C(a) : C(b);
}
template <typename A, typename B>
requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
constexpr auto max(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<C>)
    return std::fmax(C(a), C(b));
  else
    return C(a) < C(b) ? C(b) : C(a);
}

[[noreturn]] inline void __trap() { cuda_emulation::Fail("__trap()"); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { cuda_emulation::Poll("__nanosleep"); }

// Bits.
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline unsigned __brev(unsigned x) {
  unsigned turned = 0;
  for (int i = 0; i < 32; ++i) turned |= (x >> i & 1u) << (31 - i);
  return turned;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) << (by & 31u) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (by & 31u));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned select = selector >> (4 * i) & 15u;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (select & 7u))) & 255u;
    if ((select & 8u) != 0) byte = (byte & 128u) != 0 ? 255u : 0u;
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned __vcmpeq2(unsigned x, unsigned y) {
  const unsigned different = x ^ y;
  return ((different & 0xffffu) == 0 ? 0xffffu : 0u) |
         ((different & 0xffff0000u) == 0 ? 0xffff0000u : 0u);
}
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(uint64_t{x} * y >> 32);
}

// Arithmetic.
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)));
}
inline float rsqrtf(float x) { return __frsqrt_rn(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __saturatef(float x) { return x > 0.0f ? std::fmin(x, 1.0f) : 0.0f; }
inline int __float2int_rn(float x) { return static_cast<int>(std::rint(x)); }
inline unsigned __float2uint_rn(float x) { return static_cast<unsigned>(std::rint(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }

// Memory.
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
void __stcg(T* to, const std::type_identity_t<T>& value) {
  *to = value;
}
template <typename T>
void __stcs(T* to, const std::type_identity_t<T>& value) {
  *to = value;
}
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return cuda_emulation::SharedAddress(pointer);
}
template <typename T>
T atomicAdd(T* to, std::type_identity_t<T> term) {
  return std::exchange(*to, static_cast<T>(*to + term));
}
template <typename T>
T atomicMax(T* to, std::type_identity_t<T> other) {
  return std::exchange(*to, std::max(*to, other));
}
template <typename T>
T atomicMin(T* to, std::type_identity_t<T> other) {
  return std::exchange(*to, std::min(*to, other));
}
template <typename T>
T atomicOr(T* to, std::type_identity_t<T> bits) {
  return std::exchange(*to, static_cast<T>(*to | bits));
}
template <typename T>
T atomicExch(T* to, std::type_identity_t<T> value) {
  return std::exchange(*to, value);
}
template <typename T>
T atomicCAS(T* to, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  const T before = *to;
  if (before == expected) *to = value;
  return before;
}

// Barriers.
inline void __syncthreads() { cuda_emulation::Sync("__syncthreads", 0, 0, false); }
inline int __syncthreads_or(int vote) {
  return cuda_emulation::Sync("__syncthreads_or", 0, 0, vote != 0).yes > 0 ? 1 : 0;
}
inline int __syncthreads_and(int vote) {
  const cuda_emulation::Votes votes = cuda_emulation::Sync("__syncthreads_and", 0, 0, vote != 0);
  return votes.yes == votes.all ? 1 : 0;
}
inline int __syncthreads_count(int vote) {
  return cuda_emulation::Sync("__syncthreads_count", 0, 0, vote != 0).yes;
}

// Warp collectives.
namespace cuda_emulation {

struct Nothing {};
inline void SyncWarp(uint32_t mask) {
  Nothing nothing;
  Together("__syncwarp", mask, &nothing, [](const auto&) {});
}

/// The value of lane source(lane), or its own where there is none.
template <typename T, typename Source>
T Shuffle(const char* what, uint32_t mask, const T& value, const Source& source) {
  struct Data {
    T value;
    T got;
    Source source;
  } mine = {value, value, source};
  Together(what, mask, &mine, [&](const auto& of) {
    for (int lane = 0; lane < 32; ++lane) {
      if ((mask >> lane & 1u) == 0) continue;
      const int from = of(lane).source(lane);
      if ((mask >> from & 1u) == 0) Fail(std::string(what) + " from a lane outside of the mask");
      of(lane).got = of(from).value;
    }
  });
  return mine.got;
}

/// combine over the values of all lanes, in their order.
template <typename T, typename Combine>
T Reduce(const char* what, uint32_t mask, T value, const Combine& combine) {
  struct Data {
    T value;
    T got;
  } mine = {value, value};
  Together(what, mask, &mine, [&](const auto& of) {
    T total = {};
    bool first = true;
    for (int lane = 0; lane < 32; ++lane) {
      if ((mask >> lane & 1u) == 0) continue;
      total = first ? of(lane).value : combine(total, of(lane).value);
      first = false;
    }
    for (int lane = 0; lane < 32; ++lane) {
      if ((mask >> lane & 1u) != 0) of(lane).got = total;
    }
  });
  return mine.got;
}

}  // namespace cuda_emulation

inline void __syncwarp(unsigned mask = ~0u) { cuda_emulation::SyncWarp(mask); }
template <typename T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  return cuda_emulation::Shuffle("__shfl_sync", mask, value,
                                 [=](int lane) { return (lane & -width) | (from & (width - 1)); });
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32) {
  return cuda_emulation::Shuffle("__shfl_xor_sync", mask, value, [=](int lane) {
    const int from = lane ^ with;
    return (from & -width) > (lane & -width) ? lane : from;
  });
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  return cuda_emulation::Shuffle("__shfl_up_sync", mask, value, [=](int lane) {
    return lane % width < static_cast<int>(by) ? lane : lane - static_cast<int>(by);
  });
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  return cuda_emulation::Shuffle("__shfl_down_sync", mask, value, [=](int lane) {
    return lane % width + static_cast<int>(by) >= width ? lane : lane + static_cast<int>(by);
  });
}
inline unsigned __ballot_sync(unsigned mask, int vote) {
  const unsigned mine = vote != 0 ? 1u << cuda_emulation::Lane() : 0u;
  return cuda_emulation::Reduce("__ballot_sync", mask, mine,
                                [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return cuda_emulation::Reduce("__reduce_max_sync", mask, value,
                                [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0 ? 1 : 0; }
inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) == mask ? 1 : 0; }
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  struct Data {
    T value;
    unsigned same;
  } mine = {value, 0};
  cuda_emulation::Together("__match_any_sync", mask, &mine, [&](const auto& of) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int other = 0; other < 32; ++other) {
        if ((mask >> lane & mask >> other & 1u) == 0) continue;
        if (of(lane).value == of(other).value) of(lane).same |= 1u << other;
      }
    }
  });
  return mine.same;
}
template <std::integral T>
T __reduce_or_sync(unsigned mask, T value) {
  return cuda_emulation::Reduce("__reduce_or_sync", mask, value, [](T a, T b) { return a | b; });
}
template <std::integral T>
T __reduce_add_sync(unsigned mask, T value) {
  return cuda_emulation::Reduce("__reduce_add_sync", mask, value, [](T a, T b) { return a + b; });
}
template <std::integral T>
T __reduce_max_sync(unsigned mask, T value) {
  return cuda_emulation::Reduce("__reduce_max_sync", mask, value,
                                [](T a, T b) { return a < b ? b : a; });
}
template <std::integral T>
T __reduce_min_sync(unsigned mask, T value) {
  return cuda_emulation::Reduce("__reduce_min_sync", mask, value,
                                [](T a, T b) { return b < a ? b : a; });
}
