// The product with int8 activations on CPU panels, one multiply function per instruction set.
//
// Activations are quantized per row and block of 32 k: q = round(x / scale), scale = amax / 127.
// Weights become bytes u with value(code) = (u - offset) / factor, so that a block's dot product
//   sum((u - offset) q) = sum(u q) - offset sum(q)
// is exact in int32. Then, in fp32 and in this order on every instruction set,
//   out += ((dot - factor zero sum(q)) (weight scale / factor)) activation scale
// which makes the rows of all instruction sets agree bit for bit.
#pragma once

#include <cstdint>

#include "backends/cpu/exact_kernel.h"
#include "backends/cpu/panels.h"

namespace marlin::cpu {

/// One block of 32 quantized activations. Byte 4 i + c holds k = 2 i + {0, 16, 1, 17}[c], the order
/// in which panel words give their codes without crossing lanes. One cache line: a tile reads all
/// of a block or nothing.
struct alignas(kVectorBytes) Int8Block {
  int8_t q[kSliceK];
  float scale;  ///< NaN or Inf for a block that holds one.
  int32_t sum;  ///< Of all q.
};

/// How a format's codes become unsigned bytes: value(code) = (byte - offset) / factor.
struct ByteCodes {
  uint8_t
      byte[16];  ///< Of a code of up to 4 bits, replicated; 8-bit codes are flipped in the sign.
  int32_t offset;
  float factor;
};

/// Whether a format's values are integers, or halves of integers, that fit the byte products.
bool HasByteCodes(Format format);
/// Precondition: HasByteCodes(weights.format).
ByteCodes ByteCodesOf(const PanelView& weights);

/// Replaces a row of fp32 activations, as ExactKernels::pack_row leaves it, by its blocks, in
/// place.
void QuantizeRow(float* x, int64_t padded_k);

/// The multiply functions read rows of Int8Block where the exact ones read rows of fp32.
namespace scalar {
ExactKernels::MultiplyBlock SelectW4a8(const PanelView& weights);
}
namespace avx2 {
ExactKernels::MultiplyBlock SelectW4a8(const PanelView& weights);
}
namespace vnni {
ExactKernels::MultiplyBlock SelectW4a8(const PanelView& weights);
}

}  // namespace marlin::cpu
