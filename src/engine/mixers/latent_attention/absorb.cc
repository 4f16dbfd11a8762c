#include "engine/mixers/latent_attention/absorb.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "base/transpose.h"
#include "marlin/decoder.h"

namespace marlin {
namespace {

/// The rows of kv_b [heads * (nope_dim + v_dim), kv_rank] as a type, on the host.
Result<std::vector<uint8_t>> DequantizedRows(const Device& device, const Projection& kv_b,
                                             DType type) {
  const int64_t bytes = kv_b.out * kv_b.in * DTypeBytes(type);
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer rows, DeviceBuffer::Allocate(device, bytes));
  int64_t first = 0;
  for (const PreparedWeights& part : kv_b.parts) {
    std::vector<int32_t> ids(static_cast<size_t>(part.spec().n));
    std::iota(ids.begin(), ids.end(), 0);
    auto* const to = static_cast<uint8_t*>(rows.data()) + first * kv_b.in * DTypeBytes(type);
    const MutableTensorView out(to, type, {part.spec().n, kv_b.in});
    MARLIN_RETURN_IF_ERROR(LookUpRows(device, part, std::span<const int32_t>(ids), out));
    first += part.spec().n;
  }
  MARLIN_RETURN_IF_ERROR(device.Synchronize());
  std::vector<uint8_t> host(static_cast<size_t>(bytes));
  MARLIN_RETURN_IF_ERROR(rows.CopyTo(host.data(), bytes));
  return host;
}

/// Writes the transpose of a matrix [rows, columns].
template <typename T>
void Transpose(const uint8_t* matrix, int64_t rows, int64_t columns, uint8_t* to) {
  TransposeColumns(reinterpret_cast<const T*>(matrix), rows, columns, 0, columns,
                   reinterpret_cast<T*>(to));
}

Result<DeviceBuffer> Upload(const Device& device, const std::vector<uint8_t>& bytes) {
  const auto count = static_cast<int64_t>(bytes.size());
  MARLIN_ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::Allocate(device, count));
  MARLIN_RETURN_IF_ERROR(buffer.CopyFrom(bytes.data(), count));
  return buffer;
}

}  // namespace

int64_t AbsorbedBytes(const Dimensions& shape, DType type) {
  const int64_t rows = SaturatingProduct(shape.heads, shape.nope_dim + shape.v_dim);
  return SaturatingProduct(rows, shape.kv_rank * DTypeBytes(type));
}

Result<AbsorbedProjection> Absorb(const Device& device, const Projection& kv_b,
                                  const Dimensions& shape, DType type) {
  MARLIN_ASSIGN_OR_RETURN(const std::vector<uint8_t> rows, DequantizedRows(device, kv_b, type));
  const int64_t key_bytes = shape.nope_dim * shape.kv_rank * DTypeBytes(type);
  const int64_t value_bytes = shape.v_dim * shape.kv_rank * DTypeBytes(type);
  std::vector<uint8_t> keys(static_cast<size_t>(shape.heads * key_bytes));
  std::vector<uint8_t> values(static_cast<size_t>(shape.heads * value_bytes));
  for (int64_t head = 0; head < shape.heads; ++head) {
    const uint8_t* const from = rows.data() + head * (key_bytes + value_bytes);
    uint8_t* const to = keys.data() + head * key_bytes;
    if (type == DType::kF32) {
      Transpose<uint32_t>(from, shape.nope_dim, shape.kv_rank, to);
    } else {
      Transpose<uint16_t>(from, shape.nope_dim, shape.kv_rank, to);
    }
    std::memcpy(values.data() + head * value_bytes, from + key_bytes,
                static_cast<size_t>(value_bytes));
  }
  AbsorbedProjection absorbed;
  MARLIN_ASSIGN_OR_RETURN(absorbed.keys, Upload(device, keys));
  MARLIN_ASSIGN_OR_RETURN(absorbed.values, Upload(device, values));
  absorbed.key_matrices = {
      absorbed.keys.data(), type, {shape.heads, shape.kv_rank, shape.nope_dim}};
  absorbed.value_matrices = {
      absorbed.values.data(), type, {shape.heads, shape.v_dim, shape.kv_rank}};
  return absorbed;
}

}  // namespace marlin
