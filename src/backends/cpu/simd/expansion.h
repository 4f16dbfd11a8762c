// Byte permutations that expand 2:4 panels (panels.h), for instruction sets without an expansion.
#pragma once

#include <cstdint>

namespace marlin::cpu {

/// By the metadata of two blocks, low nibble first: byte i is the number of the kept code that goes
/// to the i-th of their 8 k, or 0x80, for which byte permutations yield 0, if that k is pruned.
struct alignas(64) Expansions {
  uint64_t bytes[256];
};

constexpr Expansions MakeExpansions() {
  constexpr uint64_t kPruned = 0x80;
  Expansions table{};
  for (unsigned nibbles = 0; nibbles < 256; ++nibbles) {
    for (unsigned i = 0; i < 8; ++i) {
      const unsigned block = i / 4;
      const unsigned nibble = nibbles >> (4 * block) & 15u;
      const bool first = (nibble & 3u) == i % 4;
      const bool second = nibble >> 2 == i % 4;
      const uint64_t kept = first ? 2 * block : 2 * block + 1;
      table.bytes[nibbles] |= (first || second ? kept : kPruned) << (8 * i);
    }
  }
  return table;
}
inline constexpr Expansions kExpansions = MakeExpansions();

}  // namespace marlin::cpu
