#include "checkpoint/codes/scaled_tensors.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

#include "base/macros.h"
#include "base/scalars.h"
#include "checkpoint/convert/conversion.h"
#include "checkpoint/source_layout.h"

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

float ElementAt(const std::byte* data, DType dtype, int64_t index) {
  if (dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, data + index * 4, sizeof(value));
    return value;
  }
  uint16_t half = 0;
  std::memcpy(&half, data + index * 2, sizeof(half));
  return dtype == DType::kBf16 ? Bf16ToFloat(half) : HalfToFloat(half);
}

/// Multiplies 1 + each element of a vector, in fp32.
void MultiplyOnePlus(const std::byte* from, DType dtype, int64_t count,
                     const std::vector<int8_t>& exponents, std::byte* to) {
  for (int64_t i = 0; i < count; ++i) {
    float value = ElementAt(from, dtype, i);
    const int exponent = exponents.empty() ? 0 : exponents[static_cast<size_t>(i)];
    if (exponent != 0) value = std::ldexp(1.0F + value, exponent) - 1.0F;
    std::memcpy(to + i * static_cast<int64_t>(sizeof(value)), &value, sizeof(value));
  }
}

/// A stack of matrices as its file has them.
struct StoredMatrices {
  DType dtype;
  int64_t count = 1;
  int64_t rows = 1;
  int64_t columns = 1;
  bool rows_are_outputs = true;
};

StoredMatrices MatricesOf(const Checkpoint::Impl& source, const TensorInfo& tensor,
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
  // A plan that has exponents for a stack has found its layout.
  const Result<SourceLayout> layout = SourceLayoutOf(source, tensor);
  stored.rows_are_outputs = layout.ok() && *layout == SourceLayout::kOutIn;
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

/// As Compute, for a tensor that `before` computes in its own type.
Compute Multiplied(const Checkpoint::Impl& source, const TensorInfo& tensor,
                   const TensorExponents& exponents, Compute before) {
  if (exponents.one_plus) {
    return [before = std::move(before), exponents, dtype = tensor.dtype,
            count = tensor.shape.ElementCount()](std::byte* out) {
      std::vector<std::byte> elements(static_cast<size_t>(count * DTypeBytes(dtype)));
      before(elements.data());
      MultiplyOnePlus(elements.data(), dtype, count, exponents.out, out);
    };
  }
  return [before = std::move(before), exponents,
          stored = MatricesOf(source, tensor, exponents)](std::byte* out) {
    before(out);
    Multiply(stored, exponents, out);
  };
}

}  // namespace

DType ScaledDType(DType dtype, const TensorExponents& exponents) {
  return exponents.one_plus ? DType::kF32 : dtype;
}

Result<AlignedBuffer> ScaledTensor(const Checkpoint::Impl& source, size_t tensor,
                                   const TensorExponents& exponents) {
  const TensorInfo& info = source.tensors[tensor];
  MARLIN_ASSIGN_OR_RETURN(const LoadedTensor loaded, LoadedTensor::Load(source, tensor));
  const int64_t bytes = info.shape.ElementCount() * DTypeBytes(ScaledDType(info.dtype, exponents));
  MARLIN_ASSIGN_OR_RETURN(AlignedBuffer scaled, AlignedBuffer::Allocate(bytes));
  const auto copy = [&](std::byte* out) {
    std::memcpy(out, loaded.view().data(), static_cast<size_t>(info.bytes));
  };
  Multiplied(source, info, exponents, copy)(scaled.data());
  return scaled;
}

void ScaleTensors(const ExponentsByTensor& exponents, Checkpoint* checkpoint) {
  Checkpoint::Impl& impl = CheckpointAccess::GetMutable(checkpoint);
  for (const auto& entry : exponents) {
    const TensorExponents& own = entry.second;
    const size_t tensor = *impl.FindTensor(entry.first);
    TensorInfo& info = impl.tensors[tensor];
    Compute before;
    if (const auto found = impl.computed.find(tensor); found != impl.computed.end()) {
      before = found->second;
    } else {
      before = [mapping = impl.files[impl.tensor_file[tensor]].mapping, from = info.offset,
                bytes = info.bytes](std::byte* out) {
        std::memcpy(out, mapping->data() + from, static_cast<size_t>(bytes));
      };
    }
    impl.computed[tensor] = Multiplied(impl, info, own, std::move(before));
    info.dtype = ScaledDType(info.dtype, own);
    info.bytes = info.shape.ElementCount() * DTypeBytes(info.dtype);
  }
}

}  // namespace marlin
