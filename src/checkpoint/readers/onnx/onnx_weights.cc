#include "checkpoint/readers/onnx/onnx_weights.h"

#include <fmt/core.h>

#include <array>

#include "base/printable.h"
#include "base/transpose.h"

namespace marlin {
namespace {

/// Elements of this many bytes, which files need not align.
template <size_t kBytes>
void WriteTransposedElements(const OnnxSource& source, std::byte* out) {
  using Element = std::array<std::byte, kBytes>;
  const Shape& shape = source.tensor.shape;
  const int64_t rows = shape[shape.rank() - 2];
  const int64_t columns = shape[shape.rank() - 1];
  const auto* from = reinterpret_cast<const Element*>(source.data);
  auto* to = reinterpret_cast<Element*>(out);
  for (int64_t i = 0; i < source.count(); i += rows * columns) {
    TransposeColumns(from + i, rows, columns, 0, columns, to + i);
  }
}

}  // namespace

void OnnxSource::WriteTransposed(std::byte* out) const {
  switch (DTypeBytes(*OnnxDType(tensor.type))) {
    case 1:
      return WriteTransposedElements<1>(*this, out);
    case 2:
      return WriteTransposedElements<2>(*this, out);
    case 4:
      return WriteTransposedElements<4>(*this, out);
    default:
      return WriteTransposedElements<8>(*this, out);
  }
}

std::string DescribeOnnxSource(const OnnxSource& source) {
  return fmt::format("\"{}\" {} {}", Printable(source.tensor.name),
                     OnnxTypeName(source.tensor.type), source.tensor.shape.ToString());
}

}  // namespace marlin
