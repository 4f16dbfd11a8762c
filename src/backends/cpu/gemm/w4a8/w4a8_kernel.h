// The GEMM with int8 activations (W4A8) on CPU panels, one multiply function per instruction set.
//
// Activations are quantized per row and block of 32 k: q = round(x / scale), scale = amax / 127.
// Weights become integers w = factor value(code), so that a block's dot product sum(w q) is exact
// in int32, whatever its instruction set makes unsigned on the way. Then, in fp32,
//   out += (sum(w q) - factor zero sum(q)) ((weight scale / factor) activation scale)
// with one rounding of the last product and the sum, and in this order on every instruction set, so
// that their results are bit-identical.
#pragma once

#include <cstdint>

#include "backends/cpu/gemm/exact/exact_kernel.h"
#include "backends/cpu/pack/panels.h"

namespace marlin::cpu {

/// One block of 32 quantized activations. Byte 4 i + c holds k = 2 i + {0, 16, 1, 17}[c], the order
/// in which panel words yield their codes without cross-lane shuffles. One cache line, because a
/// tile always reads a whole block.
struct alignas(kVectorBytes) Int8Block {
  int8_t q[kSliceK];
  float scale;  ///< NaN or Inf for a block that holds one.
  float sum;    ///< Sum of q, for the corrections.
};

/// Mapping of a format's codes to unsigned bytes: value(code) = (byte - offset) / factor.
struct ByteCodes {
  uint8_t
      byte[16];  ///< By code of up to 4 bits, replicated. For 8-bit codes the sign bit is flipped.
  int32_t offset;
  float factor;
  /// The code of value 0, which is subtracted from codes of 5 and 6 bits for their signed bytes.
  uint32_t zero;
};

/// Whether a format's values are integers, or multiples of 1/2, in the range of the byte kernels.
bool HasByteCodes(Format format);
/// Precondition: HasByteCodes(weights.format).
ByteCodes ByteCodesOf(const PanelView& weights);

/// Quantizes a row of fp32 activations, packed by ExactKernels::pack_row, to Int8Blocks.
void QuantizeRow(const float* x, int64_t padded_k, Int8Block* out);

/// As the exact multiply functions, with rows of Int8Block instead of fp32.
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
