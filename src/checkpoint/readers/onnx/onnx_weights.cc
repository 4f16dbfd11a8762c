#include "checkpoint/readers/onnx/onnx_weights.h"

#include <fmt/core.h>

#include "base/printable.h"
#include "checkpoint/codes/unpack.h"

namespace marlin {
void OnnxSource::WriteTransposed(std::byte* out) const {
  const int64_t rows = tensor.shape[tensor.shape.rank() - 2];
  const int64_t columns = tensor.shape[tensor.shape.rank() - 1];
  TransposeElements(data, count() / (rows * columns), rows, columns,
                    DTypeBytes(*OnnxDType(tensor.type)), out);
}

std::string DescribeOnnxSource(const OnnxSource& source) {
  return fmt::format("\"{}\" {} {}", Printable(source.tensor.name),
                     OnnxTypeName(source.tensor.type), source.tensor.shape.ToString());
}

}  // namespace marlin
