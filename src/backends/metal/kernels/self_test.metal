// marlin_self_test: probes the undocumented behaviour that the kernels rely on; the host compares.
//
//   out[0, 64)     the elements of A that each lane holds: lane 0's two, lane 1's two, ...
//   out[64, 128)   the same for A x B
//   out[128, 192)  A x B as written by simdgroup_store
//   out[192]       1 if a NaN differs from itself, 0 under fast math
//   out[193]       (input[129] - 1024) - input[130]; differs if it was reassociated
//   out[194]       input[131] * 2^20 for a subnormal input[131]; 0 if subnormals are flushed
//   out[195]       the number at the address in input[132, 134); 0 without an address
//   out[196, 228)  what each lane gets from lane 31 - lane by a shuffle
//   out[228]       the sum over the simdgroup of lane + 1
//
// input: A [8, 8], B [8, 8], four numbers, the 64 bits of an address or 0. One simdgroup.
#include <metal_simdgroup_matrix>

#include "backends/metal/kernels/fragments.h"

using namespace metal;
using namespace marlin::kernels;

[[kernel]] void marlin_self_test(device const float* input [[buffer(MARLIN_BUFFER_INPUT)]],
                                 device float* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                 constant Parameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                 ushort lane [[thread_index_in_simdgroup]]) {
  constexpr int kSide = 8;
  constexpr int kElements = kSide * kSide;
  simdgroup_float8x8 a;
  simdgroup_float8x8 b;
  simdgroup_load(a, input, kSide);
  simdgroup_load(b, input + kElements, kSide);
  simdgroup_float8x8 product = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_multiply_accumulate(product, a, b, product);
  const float2 of_a = ElementsOf(a);
  const float2 of_product = ElementsOf(product);
  out[2 * lane] = of_a.x;
  out[2 * lane + 1] = of_a.y;
  out[kElements + 2 * lane] = of_product.x;
  out[kElements + 2 * lane + 1] = of_product.y;
  simdgroup_store(product, out + 2 * kElements, kSide);
  device float* shuffles = out + 3 * kElements + 4;
  shuffles[lane] = simd_shuffle(float(lane + 1), ushort(kLanes - 1 - lane));
  const float sum = simd_sum(float(lane + 1));
  if (lane != 0) return;
  const device float* numbers = input + 2 * kElements;
  device float* answers = out + 3 * kElements;
  answers[0] = numbers[0] != numbers[0] ? 1.0f : 0.0f;
  // The same expression as in the decoders: code offset, then zero point. k is 1.
  answers[1] = (numbers[1] - 1024.0f) - numbers[2] * float(p.k);
  answers[2] = numbers[3] * 1048576.0f;
  struct Pointer {
    const device float* number;
  };
  const device float* number = reinterpret_cast<const device Pointer*>(numbers + 4)->number;
  answers[3] = number == nullptr ? 0.0f : *number;
  shuffles[kLanes] = sum;
}
