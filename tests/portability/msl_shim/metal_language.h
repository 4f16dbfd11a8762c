// Features of Metal Shading Language that C++17 lacks, as far as the codec headers use them.
#pragma once

#define __METAL_VERSION__ 310
// A read-only address space: a plain pointer cannot hold the address of such an object.
#define constant __attribute__((address_space(2))) const
typedef unsigned int uint;

template <typename To, typename From>
static inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs equal sizes");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}
