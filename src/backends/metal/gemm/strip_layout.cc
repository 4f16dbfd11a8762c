#include "backends/metal/gemm/strip_layout.h"

namespace marlin::metal {

int CodeBitsOf(const WeightsSpec& spec) {
  return spec.sparsity == Sparsity::k24 ? kernels::kSparse4 : GetFormatInfo(spec.format).bits;
}

kernels::CodeKind CodeKindOf(Format format) {
  switch (format) {
    case Format::kFp4E2M1:
      return kernels::kCodesFp4;
    case Format::kU4:
    case Format::kS4:
    case Format::kInt3:
    case Format::kInt2:
    case Format::kS8:
    case Format::kU8:
      return kernels::kCodesInteger;
    case Format::kFp8E4M3:
      return kernels::kCodesE4M3;
    case Format::kFp8E5M2:
      return kernels::kCodesE5M2;
    case Format::kBf16:
      return kernels::kCodesBf16;
    case Format::kFp16:
      return kernels::kCodesF16;
    case Format::kFp32:
      return kernels::kCodesF32;
    default:
      return kernels::kCodesTable;
  }
}

int CodeFlipOf(Format format) { return format == Format::kS8 ? 0x80 : 0; }

int CodeOffsetOf(Format format) {
  if (CodeKindOf(format) != kernels::kCodesInteger) return 0;
  return -static_cast<int>(FormatValues(format)[static_cast<size_t>(CodeFlipOf(format))]);
}

kernels::ElementType ElementTypeOf(ScaleType type) {
  switch (type) {
    case ScaleType::kF16:
      return kernels::kElementF16;
    case ScaleType::kBf16:
      return kernels::kElementBf16;
    case ScaleType::kE8M0:
      return kernels::kElementE8M0;
    case ScaleType::kE4M3:
      return kernels::kElementE4M3;
    default:
      return kernels::kElementF32;
  }
}

kernels::ElementType ElementTypeOf(DType type) {
  if (type == DType::kBf16) return kernels::kElementBf16;
  if (type == DType::kF8E4M3) return kernels::kElementE4M3;
  return type == DType::kF16 ? kernels::kElementF16 : kernels::kElementF32;
}

}  // namespace marlin::metal
