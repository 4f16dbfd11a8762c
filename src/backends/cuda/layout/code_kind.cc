#include "backends/cuda/layout/code_kind.h"

#include "layout/plain_weights.h"

namespace marlin::cuda {

CodeKind KindOf(Format format) {
  switch (format) {
    case Format::kFp4E2M1:
      return CodeKind::kFp4;
    case Format::kU4:
    case Format::kS4:
      return CodeKind::kInt4;
    case Format::kFp8E4M3:
      return CodeKind::kE4M3;
    case Format::kFp8E5M2:
      return CodeKind::kE5M2;
    case Format::kS8:
    case Format::kU8:
      return CodeKind::kInt8;
    default:
      break;
  }
  // All other formats are decoded by a table of their values.
  switch (GetFormatInfo(format).bits) {
    case 2:
      return CodeKind::kTable2;
    case 3:
      return CodeKind::kTable3;
    case 4:
      return CodeKind::kTable4;
    case 5:
    case 6:
      return KindOf(WiderFormat(format));  // As which preparation takes them.
    default:
      return CodeKind::kDense16;
  }
}

}  // namespace marlin::cuda
