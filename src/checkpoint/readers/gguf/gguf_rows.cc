#include "checkpoint/readers/gguf/gguf_rows.h"

#include <algorithm>
#include <cstring>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "layout/move_runs.h"
#include "layout/packing.h"
#include "layout/weights_buffer.h"
#include "layout/weights_shapes.h"

namespace marlin {
namespace {

constexpr int64_t kTileRows = 16;

const uint8_t* Bytes(const std::byte* data) { return reinterpret_cast<const uint8_t*>(data); }

/// Stores the low bytes of a scale.
void StoreBits(uint32_t bits, int64_t size, void* to, int64_t index) {
  std::memcpy(static_cast<std::byte*>(to) + index * size, &bits, static_cast<size_t>(size));
}

/// Where the parts of one expert go.
struct ExpertParts {
  uint32_t* words;
  std::byte* scales;
  std::byte* biases;
  std::byte* super_scales;
  std::byte* super_biases;
};

/// Stores the scales and biases of one block, whose first group is `group`, in column n.
void StoreGroups(const GgufFormat& format, const GgufDecoded& decoded, int64_t groups,
                 const WeightsSpec& spec, int64_t group, int64_t n, const ExpertParts& to) {
  const int64_t scale_bytes = DTypeBytes(StoredScaleDType(spec));
  if (spec.super_group_size > 0) {
    const int64_t super_bytes = DTypeBytes(ScaleDType(spec.scale_type));
    const int64_t at = group / groups * spec.n + n;  // A block is a super group.
    StoreBits(decoded.super_scale, super_bytes, to.super_scales, at);
    if (format.biases) StoreBits(decoded.super_bias, super_bytes, to.super_biases, at);
  }
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = (group + g) * spec.n + n;
    StoreBits(decoded.scales[static_cast<size_t>(g)], scale_bytes, to.scales, at);
    if (!format.biases) continue;
    StoreBits(decoded.biases[static_cast<size_t>(g)], scale_bytes, to.biases, at);
  }
}

/// Decodes rows [first, first + kTileRows) of an expert, as far as there are, and packs them as
/// columns.
void PackTile(const GgufRows& rows, const GgufStored& stored, const WeightsSpec& spec,
              int64_t expert, int64_t first, const ExpertParts& to, uint8_t* codes) {
  const GgufFormat& format = *stored.format;
  const int64_t count = std::min(kTileRows, spec.n - first);
  const int64_t stride = RoundUp(spec.k, kPackRun);
  const int64_t groups = stored.elements / format.group_size;
  GgufDecoded decoded;
  for (int64_t r = 0; r < count; ++r) {
    const uint8_t* block = Bytes(rows.Row(expert, first + r));
    for (int64_t k = 0; k < spec.k; k += stored.elements, block += stored.bytes) {
      format.decode(block, &decoded);
      std::memcpy(codes + r * stride + k, decoded.codes.data(),
                  static_cast<size_t>(stored.elements));
      StoreGroups(format, decoded, groups, spec, k / format.group_size, first + r, to);
    }
  }
  PackColumns(GetFormatInfo(spec.format).bits, {codes, stride, spec.k, count}, to.words + first,
              spec.n);
}

/// The values of one row in fp32. Precondition: the type is quantized, F32, F16 or BF16.
void RowValues(const std::byte* row, int64_t row_bytes, const GgufStored& stored, float* out) {
  if (stored.quantized()) {
    for (int64_t at = 0; at < row_bytes; at += stored.bytes, out += stored.elements) {
      DequantizeBlock(*stored.format, stored.elements, Bytes(row + at), out);
    }
    return;
  }
  for (int64_t at = 0; at < row_bytes; at += stored.bytes, ++out) {
    uint16_t bits = 0;
    std::memcpy(&bits, row + at, sizeof(bits));
    *out = stored.dtype == DType::kBf16 ? Bf16ToFloat(bits) : HalfToFloat(bits);
    if (stored.dtype == DType::kF32) std::memcpy(out, row + at, sizeof(float));
  }
}

}  // namespace

const std::byte* GgufRows::Row(int64_t expert, int64_t row) const {
  const auto parts = static_cast<int64_t>(stacks.size());
  const int64_t all = stored > 0 ? stored : rows;
  const int64_t in_stack = all / parts;
  const int64_t place = places.empty() ? row : places[static_cast<size_t>(row)];
  const int64_t stack = in_turn ? place % parts : place / in_stack;
  const int64_t at = in_turn ? place / parts : place % in_stack;
  return stacks[static_cast<size_t>(stack)] + (expert * in_stack + at) * row_bytes;
}

void CopyGgufRows(const GgufRows& rows, int64_t element_bytes, bool transposed, std::byte* out) {
  const int64_t columns = rows.row_bytes / element_bytes;
  const auto parts = static_cast<int64_t>(rows.column_parts.size());
  for (int64_t e = 0; e < rows.experts; ++e) {
    for (int64_t r = 0; r < rows.rows; ++r) {
      const std::byte* const row = rows.Row(e, r);
      std::byte* const copy = out + (e * rows.rows + r) * rows.row_bytes;
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t bytes = rows.row_bytes / parts;
        std::memcpy(copy + part * bytes, row + rows.column_parts[static_cast<size_t>(part)] * bytes,
                    static_cast<size_t>(bytes));
      }
      if (parts > 0) continue;
      if (!transposed) {
        std::memcpy(copy, row, static_cast<size_t>(rows.row_bytes));
        continue;
      }
      std::byte* const matrix = out + e * rows.rows * rows.row_bytes;
      for (int64_t c = 0; c < columns; ++c) {
        std::memcpy(matrix + (c * rows.rows + r) * element_bytes, row + c * element_bytes,
                    static_cast<size_t>(element_bytes));
      }
    }
  }
}

void JoinGgufLatent(const GgufLatent& latent, float* out) {
  const GgufRows& keys = latent.keys;
  const int64_t rank = keys.rows;
  const int64_t nope = keys.row_bytes / latent.keys_stored.bytes * latent.keys_stored.elements;
  std::vector<float> row(static_cast<size_t>(nope));
  for (int64_t head = 0; head < keys.experts; ++head) {
    for (int64_t r = 0; r < rank; ++r) {
      RowValues(keys.Row(head, r), keys.row_bytes, latent.keys_stored, row.data());
      for (int64_t i = 0; i < nope; ++i) out[i * rank + r] = row[static_cast<size_t>(i)];
    }
    out += nope * rank;
    for (int64_t i = 0; i < latent.values.rows; ++i, out += rank) {
      RowValues(latent.values.Row(head, i), latent.values.row_bytes, latent.values_stored, out);
    }
  }
}

void DequantizeGgufRows(const GgufRows& rows, const GgufStored& stored, float* out) {
  const int64_t blocks = rows.row_bytes / stored.bytes;
  for (int64_t e = 0; e < rows.experts; ++e) {
    for (int64_t r = 0; r < rows.rows; ++r) {
      const uint8_t* const row = Bytes(rows.Row(e, r));
      for (int64_t b = 0; b < blocks; ++b, out += stored.elements) {
        DequantizeBlock(*stored.format, stored.elements, row + b * stored.bytes, out);
      }
    }
  }
}

Result<QuantizedWeights> PackGgufRows(const GgufRows& rows, const GgufStored& stored,
                                      const WeightsSpec& spec,
                                      const std::vector<float>& global_scale, ThreadPool& pool) {
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer buffer, AllocateWeights(spec));
  const int64_t tile_bytes = kTileRows * RoundUp(spec.k, kPackRun);
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer codes,
                          AlignedBuffer::Allocate(pool.worker_count() * tile_bytes));
  const auto part_of = [](void* part, int64_t expert, int64_t bytes) {
    return part == nullptr ? nullptr : static_cast<std::byte*>(part) + expert * bytes;
  };
  const int64_t scale_bytes = GroupCount(spec) * spec.n * DTypeBytes(StoredScaleDType(spec));
  const int64_t super_bytes =
      SuperGroupCount(spec) * spec.n * DTypeBytes(ScaleDType(spec.scale_type));
  const int64_t words = WordsAlongK(spec.format, spec.k) * spec.n;
  const int64_t tiles = CeilDivide(spec.n, kTileRows);
  pool.Run(spec.experts * tiles, [&](int64_t task, int worker) {
    const int64_t e = task / tiles;
    const ExpertParts to{
        static_cast<uint32_t*>(buffer.codes) + e * words, part_of(buffer.scales, e, scale_bytes),
        part_of(buffer.biases, e, scale_bytes), part_of(buffer.super_scales, e, super_bytes),
        part_of(buffer.super_biases, e, super_bytes)};
    PackTile(rows, stored, spec, e, task % tiles * kTileRows, to,
             codes.As<uint8_t>() + worker * tile_bytes);
  });
  for (int64_t e = 0; spec.has_global_scale && e < spec.experts; ++e) {
    const size_t at = global_scale.size() > 1 ? static_cast<size_t>(e) : 0;
    buffer.global_scale[e] = global_scale.empty() ? 1.0F : global_scale[at];
  }
  if (const float* const table = stored.format->codebook) {
    buffer.weights.codebook.assign(table, table + (1 << GetFormatInfo(spec.format).bits));
  }
  if (rows.column_parts.empty()) return std::move(buffer.weights);
  const int64_t run = spec.k / static_cast<int64_t>(rows.column_parts.size());
  return MoveRuns(buffer.weights, run, rows.column_parts);
}

}  // namespace marlin
