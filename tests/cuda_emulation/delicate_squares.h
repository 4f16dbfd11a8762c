// Numbers that tell the order in which their squares are added.
#pragma once

#include <algorithm>
#include <random>
#include <span>

namespace cuda_emulation {

/// Four numbers are not zero, in places whose numbers differ in two bits. The first two squares
/// alone are between two numbers of fp32. The two others decide how the sum is rounded, if they
/// meet before they come to the large one, next to which each is lost in fp64. Precondition: there
/// are four numbers.
inline void FillDelicate(std::span<float> numbers, std::mt19937& random) {
  std::ranges::fill(numbers, 0.0f);
  const auto bit = [&] {
    size_t place = 1;
    while (2 * place < numbers.size() && random() % 8 != 0) place *= 2;
    return place;
  };
  while (true) {
    const size_t base = random() % numbers.size();
    const size_t x = bit();
    const size_t y = bit();
    if (x == y || std::max({base ^ x, base ^ y, base ^ x ^ y}) >= numbers.size()) continue;
    numbers[base] = 1.0f;
    numbers[base ^ x] = 0x1p-12f;  // Half a unit in the last place of fp32.
    numbers[base ^ y] = numbers[base ^ x ^ y] = 0x1.4p-27f;  // 0.39 of one of fp64.
    return;
  }
}

}  // namespace cuda_emulation
