#include "checkpoint/codes/scaled_tensors.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

#include "base/macros.h"
#include "base/scalars.h"
#include "checkpoint/convert/conversion.h"
#include "checkpoint/convert/quantize_plan.h"

namespace marlin {
namespace {

using Compute = std::function<void(std::byte* out)>;

void MultiplyElement(std::byte* data, DType dtype, int64_t index, float factor) {
  if (dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, data + index * 4, sizeof(value));
    value *= factor;
    std::memcpy(data + index * 4, &value, sizeof(value));
    return;
  }
  uint16_t half = 0;
  std::memcpy(&half, data + index * 2, sizeof(half));
  const bool bf16 = dtype == DType::kBf16;
  const float product = (bf16 ? Bf16ToFloat(half) : HalfToFloat(half)) * factor;
  half = bf16 ? FloatToBf16(product) : FloatToHalf(product);
  std::memcpy(data + index * 2, &half, sizeof(half));
}

/// A stack of matrices as its file has them.
struct StoredMatrices {
  DType dtype;
  int64_t count = 1;
  int64_t rows = 1;
  int64_t columns = 1;
  bool rows_are_outputs = true;
};

StoredMatrices MatricesOf(const TensorInfo& tensor, const Json& config,
                          const TensorExponents& exponents) {
  StoredMatrices stored;
  stored.dtype = tensor.dtype;
  const Shape& shape = tensor.shape;
  const int64_t elements = shape.ElementCount();
  if (exponents.in.empty() && static_cast<int64_t>(exponents.out.size()) == elements) {
    stored.rows = elements;
    return stored;
  }
  const int rank = shape.rank();
  stored.rows = shape[rank - 2];
  stored.columns = shape[rank - 1];
  stored.count = rank == 3 ? shape[0] : 1;
  stored.rows_are_outputs = SourceLayoutOf(config, tensor.name) == SourceLayout::kOutIn;
  return stored;
}

void Multiply(const StoredMatrices& stored, const TensorExponents& exponents, std::byte* data) {
  const std::vector<int8_t>& by_row = stored.rows_are_outputs ? exponents.out : exponents.in;
  const std::vector<int8_t>& by_column = stored.rows_are_outputs ? exponents.in : exponents.out;
  const auto at = [](const std::vector<int8_t>& all, int64_t index) {
    return all.empty() ? 0 : static_cast<int>(all[static_cast<size_t>(index)]);
  };
  for (int64_t m = 0; m < stored.count; ++m) {
    for (int64_t r = 0; r < stored.rows; ++r) {
      const int64_t row = m * stored.rows + r;
      for (int64_t c = 0; c < stored.columns; ++c) {
        const int exponent = at(by_row, row) + at(by_column, m * stored.columns + c);
        if (exponent == 0) continue;
        const float factor = std::ldexp(1.0F, exponent);
        MultiplyElement(data, stored.dtype, row * stored.columns + c, factor);
      }
    }
  }
}

}  // namespace

Result<AlignedBuffer> ScaledTensor(const Checkpoint::Impl& source, size_t tensor,
                                   const TensorExponents& exponents) {
  const TensorInfo& info = source.tensors[tensor];
  MARLIN_ASSIGN_OR_RETURN(const LoadedTensor loaded, LoadedTensor::Load(source, tensor));
  MARLIN_ASSIGN_OR_RETURN(AlignedBuffer scaled, AlignedBuffer::Allocate(info.bytes));
  std::memcpy(scaled.data(), loaded.view().data(), static_cast<size_t>(info.bytes));
  Multiply(MatricesOf(info, source.config(), exponents), exponents, scaled.data());
  return scaled;
}

void ScaleTensors(const ExponentsByTensor& exponents, Checkpoint* checkpoint) {
  Checkpoint::Impl& impl = CheckpointAccess::GetMutable(checkpoint);
  for (const auto& entry : exponents) {
    const TensorExponents& own = entry.second;
    const size_t tensor = *impl.FindTensor(entry.first);
    const TensorInfo& info = impl.tensors[tensor];
    Compute before;
    if (const auto found = impl.computed.find(tensor); found != impl.computed.end()) {
      before = found->second;
    } else {
      before = [mapping = impl.files[impl.tensor_file[tensor]].mapping, from = info.offset,
                bytes = info.bytes](std::byte* out) {
        std::memcpy(out, mapping->data() + from, static_cast<size_t>(bytes));
      };
    }
    impl.computed[tensor] = [before = std::move(before), own,
                             stored = MatricesOf(info, impl.config(), own)](std::byte* out) {
      before(out);
      Multiply(stored, own, out);
    };
  }
}

}  // namespace marlin
