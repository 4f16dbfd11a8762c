#include "checkpoint/codes/unpack.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/checked.h"
#include "base/scalars.h"
#include "base/transpose.h"
#include "layout/packing.h"
#include "layout/sparse_24.h"

namespace marlin {
namespace {

constexpr int64_t kTileColumns = 16;  // The words of a tile fill a cache line of the output.

/// Runs body(expert, first column, columns, worker) for tiles that cover all rows.
template <typename Body>
void ForTiles(const WeightsSpec& spec, ThreadPool& pool, const Body& body) {
  const int64_t tiles = CeilDivide(spec.n, kTileColumns);
  pool.Run(spec.experts * tiles, [&](int64_t task, int worker) {
    const int64_t first = task % tiles * kTileColumns;
    body(task / tiles, first, std::min(kTileColumns, spec.n - first), worker);
  });
}

/// Bits of the last word of a column that hold codes.
uint32_t LastWordMask(const WeightsSpec& spec, int bits) {
  const int64_t used = spec.k * bits % 32;
  return used == 0 ? ~uint32_t{0} : (uint32_t{1} << used) - 1;
}

}  // namespace

void PackDenseRows(const DenseRows& rows, const WeightsBuffer& buffer, ThreadPool& pool) {
  const WeightsSpec& spec = buffer.weights.spec;
  if (spec.k == 0) return;
  const int bits = GetFormatInfo(spec.format).bits;
  const int64_t words = WordsAlongK(spec.format, spec.k);
  const int64_t bytes = CeilDivide(spec.k * bits, 8);  // Bytes of a row that hold codes.
  const int64_t used_words = CeilDivide(bytes, 4);     // The padding of a run is zero.
  const uint32_t mask = LastWordMask(spec, bits);
  const auto word_of = [&](const std::byte* at, size_t left) {
    uint32_t word = 0;
    if (left == 4) {
      std::memcpy(&word, at, 4);
    } else if (left > 0) {
      std::memcpy(&word, at, left);
    }
    if (rows.swap_nibbles) word = ((word >> 4) & 0x0f0f0f0fu) | ((word & 0x0f0f0f0fu) << 4);
    return word ^ rows.flip;
  };
  ForTiles(spec, pool, [&](int64_t expert, int64_t first, int64_t columns, int) {
    auto* out = static_cast<uint32_t*>(buffer.codes) + expert * words * spec.n + first;
    const std::byte* row = rows.data + (expert * spec.n + first) * rows.row_bytes;
    for (int64_t w = 0; w < words; ++w) {
      const auto left = static_cast<size_t>(std::clamp<int64_t>(bytes - 4 * w, 0, 4));
      const uint32_t kept = w < used_words - 1 ? ~uint32_t{0} : (w == used_words - 1 ? mask : 0);
      for (int64_t c = 0; c < columns; ++c) {
        out[w * spec.n + c] = word_of(row + c * rows.row_bytes + 4 * w, left) & kept;
      }
    }
  });
}

namespace {

/// Packs `count` codes of each row into `words` words of each column.
void PackRowsOf(int bits, int64_t count, UnpackRow unpack, const WeightsSpec& spec, uint32_t* words,
                int64_t word_count, ThreadPool& pool) {
  const int64_t stride = RoundUp(count, kPackRun);
  std::vector<std::vector<uint8_t>> scratch(static_cast<size_t>(pool.worker_count()));
  ForTiles(spec, pool, [&](int64_t expert, int64_t first, int64_t columns, int worker) {
    std::vector<uint8_t>& codes = scratch[static_cast<size_t>(worker)];
    codes.resize(static_cast<size_t>(std::min(kTileColumns, spec.n) * stride));
    for (int64_t c = 0; c < columns; ++c)
      unpack(expert * spec.n + first + c, codes.data() + c * stride);
    PackColumns(bits, {codes.data(), stride, count, columns},
                words + expert * word_count * spec.n + first, spec.n);
  });
}

}  // namespace

void PackByteRows(UnpackRow unpack, const WeightsBuffer& buffer, ThreadPool& pool) {
  const WeightsSpec& spec = buffer.weights.spec;
  PackRowsOf(GetFormatInfo(spec.format).bits, spec.k, unpack, spec,
             static_cast<uint32_t*>(buffer.codes), WordsAlongK(spec.format, spec.k), pool);
}

void PackKeptRows(UnpackRow codes, UnpackRow positions, const WeightsBuffer& buffer,
                  ThreadPool& pool) {
  const WeightsSpec& spec = buffer.weights.spec;
  const int64_t k = RoundUp(spec.k, kSparseRun);
  constexpr int kPositionBits = 4;
  PackRowsOf(GetFormatInfo(spec.format).bits, k / 2, codes, spec,
             static_cast<uint32_t*>(buffer.codes), WordsAlongK(spec), pool);
  PackRowsOf(kPositionBits, k / kSparseBlock, positions, spec,
             static_cast<uint32_t*>(buffer.metadata), MetadataWordsAlongK(spec.k), pool);
}

void StoreFloatRows(FloatRow values, const WeightsBuffer& buffer, ThreadPool& pool) {
  const WeightsSpec& spec = buffer.weights.spec;
  std::vector<std::vector<float>> scratch(static_cast<size_t>(pool.worker_count()));
  ForTiles(spec, pool, [&](int64_t expert, int64_t first, int64_t columns, int worker) {
    std::vector<float>& tile = scratch[static_cast<size_t>(worker)];
    tile.resize(static_cast<size_t>(std::min(kTileColumns, spec.n) * spec.k));
    for (int64_t c = 0; c < columns; ++c) {
      values(expert * spec.n + first + c, tile.data() + c * spec.k);
    }
    float* out = static_cast<float*>(buffer.codes) + expert * spec.k * spec.n + first;
    for (int64_t k = 0; k < spec.k; ++k) {
      for (int64_t c = 0; c < columns; ++c) {
        out[k * spec.n + c] = tile[static_cast<size_t>(c * spec.k + k)];
      }
    }
  });
}

namespace {

/// Elements of this many bytes, which files need not align.
template <size_t kBytes>
void TransposeOf(const std::byte* from, int64_t rows, int64_t columns, std::byte* to) {
  using Element = std::array<std::byte, kBytes>;
  TransposeColumns(reinterpret_cast<const Element*>(from), rows, columns, 0, columns,
                   reinterpret_cast<Element*>(to));
}

}  // namespace

void TransposeElements(const std::byte* from, int64_t count, int64_t rows, int64_t columns,
                       int64_t element_bytes, void* to) {
  const int64_t bytes = rows * columns * element_bytes;
  for (int64_t i = 0; i < count; ++i) {
    const std::byte* matrix = from + i * bytes;
    std::byte* out = static_cast<std::byte*>(to) + i * bytes;
    switch (element_bytes) {
      case 1:
        TransposeOf<1>(matrix, rows, columns, out);
        break;
      case 2:
        TransposeOf<2>(matrix, rows, columns, out);
        break;
      case 4:
        TransposeOf<4>(matrix, rows, columns, out);
        break;
      default:
        TransposeOf<8>(matrix, rows, columns, out);
    }
  }
}

void StoreZeros(ZeroOfGroup zero, const WeightsBuffer& buffer) {
  const WeightsSpec& spec = buffer.weights.spec;
  auto* out = static_cast<uint16_t*>(buffer.zeros);
  for (int64_t e = 0; e < spec.experts; ++e) {
    for (int64_t g = 0; g < GroupCount(spec); ++g) {
      for (int64_t n = 0; n < spec.n; ++n) {
        *out++ = FloatToHalf(static_cast<float>(zero(e * spec.n + n, g)));
      }
    }
  }
}

void StoreScales(const std::byte* from, int64_t scale_rows, const WeightsBuffer& buffer) {
  const WeightsSpec& spec = buffer.weights.spec;
  const int64_t bytes = DTypeBytes(ScaleDType(spec.scale_type));
  const int64_t groups = GroupCount(spec);
  if (scale_rows == 1) {
    return TransposeElements(from, spec.experts, spec.n, groups, bytes, buffer.scales);
  }
  const int64_t grid_rows = CeilDivide(spec.n, scale_rows);
  auto* to = static_cast<std::byte*>(buffer.scales);
  for (int64_t e = 0; e < spec.experts; ++e) {
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t n = 0; n < spec.n; ++n, to += bytes) {
        const int64_t source = (e * grid_rows + n / scale_rows) * groups + g;
        std::memcpy(to, from + source * bytes, static_cast<size_t>(bytes));
      }
    }
  }
}

uint32_t WordAt(const std::byte* data, int64_t index) {
  uint32_t word = 0;
  std::memcpy(&word, data + index * 4, sizeof(word));
  return word;
}

void UnpackDense(const std::byte* data, int bits, int64_t count, uint8_t* codes) {
  uint64_t window = 0;
  int filled = 0;
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  for (int64_t i = 0; i < count; ++i) {
    for (; filled < bits; filled += 8) window |= static_cast<uint64_t>(*data++) << filled;
    codes[i] = static_cast<uint8_t>(window & mask);
    window >>= bits;
    filled -= bits;
  }
}

}  // namespace marlin
