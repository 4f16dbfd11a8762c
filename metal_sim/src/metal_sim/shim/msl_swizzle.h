// The components of vectors by name: x, y, z, w and r, g, b, a, alone and in every combination of
// two to four, read and written, all generated from the letters. Knows nothing of arithmetic.
//
// A name like `xy` is a Swizzle that lies over the elements of its vector (a union), converts to
// the vector of the named elements, and writes nothing else when it is assigned to. Operators and
// functions take it like a vector (Operand in msl_vector.h); a template of a kernel that deduces
// vec<T, N> needs a conversion: float2(v.xy).
#pragma once

#include "metal_sim/shim/msl_types.h"

namespace metal_sim_program::metal {

template <typename T, int N>
struct vec;

/// The elements `kIndices` of a vector of N.
template <typename T, int N, int... kIndices>
struct Swizzle {
  T elements[N];

  using Value = vec<T, sizeof...(kIndices)>;
  static constexpr int kIndexOf[] = {kIndices...};

  Swizzle() = default;
  Swizzle(const Swizzle&) = default;

  METAL_SIM_INLINE constexpr Swizzle& operator=(const Value& value) {
    static_assert(IsWritable(), "a swizzle that names a component twice cannot be written");
    int next = 0;
    ((elements[kIndices] = value.elements[next++]), ...);
    return *this;
  }
  METAL_SIM_INLINE constexpr Swizzle& operator=(const Swizzle& other) {
    return *this = static_cast<Value>(other);
  }

  METAL_SIM_INLINE constexpr operator Value() const { return Value(elements[kIndices]...); }

  METAL_SIM_INLINE constexpr T& operator[](size_t index) { return elements[kIndexOf[index]]; }
  METAL_SIM_INLINE constexpr const T& operator[](size_t index) const {
    return elements[kIndexOf[index]];
  }

  /// A swizzle of a swizzle goes one component deep: v.wzyx.y.
  METAL_SIM_INLINE constexpr T GetFirst() const { return elements[kIndexOf[0]]; }
  METAL_SIM_INLINE constexpr T GetSecond() const { return elements[kIndexOf[1]]; }
  METAL_SIM_INLINE constexpr T GetThird() const { return elements[kIndexOf[2]]; }
  METAL_SIM_INLINE constexpr T GetFourth() const { return elements[kIndexOf[3]]; }
  __declspec(property(get = GetFirst)) T x;
  __declspec(property(get = GetSecond)) T y;
  __declspec(property(get = GetThird)) T z;
  __declspec(property(get = GetFourth)) T w;

 private:
  static constexpr bool IsWritable() {
    unsigned seen = 0;
    bool writable = true;
    ((writable = writable && (seen >> kIndices & 1) == 0, seen |= 1u << kIndices), ...);
    return writable;
  }
};

}  // namespace metal_sim_program::metal

// A component is written (letter of position, letter of color, index). The members of a union for
// names of two, three and four letters:
#define METAL_SIM_MEMBER_2(N, p0, c0, i0, p1, c1, i1) metal::Swizzle<T, N, i0, i1> p0##p1, c0##c1;
#define METAL_SIM_MEMBER_3(N, p0, c0, i0, p1, c1, i1, p2, c2, i2) \
  metal::Swizzle<T, N, i0, i1, i2> p0##p1##p2, c0##c1##c2;
#define METAL_SIM_MEMBER_4(N, p0, c0, i0, p1, c1, i1, p2, c2, i2, p3, c3, i3) \
  metal::Swizzle<T, N, i0, i1, i2, i3> p0##p1##p2##p3, c0##c1##c2##c3;

// MACRO(every component of a vector of N, more...). One for each depth of nesting: the
// preprocessor does not expand a macro within itself.
#define METAL_SIM_FIRST_2(MACRO, ...) MACRO(__VA_ARGS__, x, r, 0) MACRO(__VA_ARGS__, y, g, 1)
#define METAL_SIM_FIRST_3(MACRO, ...) \
  METAL_SIM_FIRST_2(MACRO, __VA_ARGS__) MACRO(__VA_ARGS__, z, b, 2)
#define METAL_SIM_FIRST_4(MACRO, ...) \
  METAL_SIM_FIRST_3(MACRO, __VA_ARGS__) MACRO(__VA_ARGS__, w, a, 3)
#define METAL_SIM_SECOND_2(MACRO, ...) MACRO(__VA_ARGS__, x, r, 0) MACRO(__VA_ARGS__, y, g, 1)
#define METAL_SIM_SECOND_3(MACRO, ...) \
  METAL_SIM_SECOND_2(MACRO, __VA_ARGS__) MACRO(__VA_ARGS__, z, b, 2)
#define METAL_SIM_SECOND_4(MACRO, ...) \
  METAL_SIM_SECOND_3(MACRO, __VA_ARGS__) MACRO(__VA_ARGS__, w, a, 3)
#define METAL_SIM_THIRD_2(MACRO, ...) MACRO(__VA_ARGS__, x, r, 0) MACRO(__VA_ARGS__, y, g, 1)
#define METAL_SIM_THIRD_3(MACRO, ...) \
  METAL_SIM_THIRD_2(MACRO, __VA_ARGS__) MACRO(__VA_ARGS__, z, b, 2)
#define METAL_SIM_THIRD_4(MACRO, ...) \
  METAL_SIM_THIRD_3(MACRO, __VA_ARGS__) MACRO(__VA_ARGS__, w, a, 3)
#define METAL_SIM_FOURTH_2(MACRO, ...) MACRO(__VA_ARGS__, x, r, 0) MACRO(__VA_ARGS__, y, g, 1)
#define METAL_SIM_FOURTH_3(MACRO, ...) \
  METAL_SIM_FOURTH_2(MACRO, __VA_ARGS__) MACRO(__VA_ARGS__, z, b, 2)
#define METAL_SIM_FOURTH_4(MACRO, ...) \
  METAL_SIM_FOURTH_3(MACRO, __VA_ARGS__) MACRO(__VA_ARGS__, w, a, 3)

// All names that start with the letters given, for a vector of N.
#define METAL_SIM_NAMES_4(...) METAL_SIM_MEMBER_4(__VA_ARGS__)
#define METAL_SIM_NAMES_3(N, ...)    \
  METAL_SIM_MEMBER_3(N, __VA_ARGS__) \
  METAL_SIM_FOURTH_##N(METAL_SIM_NAMES_4, N, __VA_ARGS__)
#define METAL_SIM_NAMES_2(N, ...)    \
  METAL_SIM_MEMBER_2(N, __VA_ARGS__) \
  METAL_SIM_THIRD_##N(METAL_SIM_NAMES_3, N, __VA_ARGS__)
#define METAL_SIM_NAMES_1(N, ...) METAL_SIM_SECOND_##N(METAL_SIM_NAMES_2, N, __VA_ARGS__)

/// The content of a vector of N: its elements, their names, and copies of the elements alone.
/// Vectors of two and four are copied at once, as one access; a vector of three must not touch the
/// bytes after it.
#define METAL_SIM_COMPONENTS(N, LETTERS, COLORS)                                      \
  template <typename T>                                                               \
  struct Components<T, N> {                                                           \
    union {                                                                           \
      T elements[N];                                                                  \
      struct {                                                                        \
        T LETTERS;                                                                    \
      };                                                                              \
      struct {                                                                        \
        T COLORS;                                                                     \
      };                                                                              \
      METAL_SIM_FIRST_##N(METAL_SIM_NAMES_1, N)                                       \
    };                                                                                \
    Components() = default;                                                           \
    METAL_SIM_INLINE constexpr Components(const Components& other) { *this = other; } \
    METAL_SIM_INLINE constexpr Components& operator=(const Components& other) {       \
      if (N == 3 || __builtin_is_constant_evaluated()) {                              \
        for (int i = 0; i < N; ++i) elements[i] = other.elements[i];                  \
      } else {                                                                        \
        __builtin_memcpy(elements, other.elements, sizeof(elements));                 \
      }                                                                               \
      return *this;                                                                   \
    }                                                                                 \
  };
#define METAL_SIM_LIST(...) __VA_ARGS__

namespace metal_sim {

template <typename T, int N>
struct Components;

METAL_SIM_COMPONENTS(2, METAL_SIM_LIST(x, y), METAL_SIM_LIST(r, g))
METAL_SIM_COMPONENTS(3, METAL_SIM_LIST(x, y, z), METAL_SIM_LIST(r, g, b))
METAL_SIM_COMPONENTS(4, METAL_SIM_LIST(x, y, z, w), METAL_SIM_LIST(r, g, b, a))

}  // namespace metal_sim
