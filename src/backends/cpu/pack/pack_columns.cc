#include "backends/cpu/pack/pack_columns.h"

#include <algorithm>
#include <cstring>

#include "backends/cpu/pack/pack_sparse.h"
#include "base/checked.h"
#include "layout/sparse_24.h"

namespace marlin::cpu {
namespace {

const uint8_t* ExpertData(const TensorView& view, int64_t expert) {
  return view.As<uint8_t>() + view.ByteCount() / view.dim(0) * expert;
}

/// Whether k is contiguous, as in [out_features, in_features] linear layers.
bool IsTransposed(const TensorView& codes) { return codes.stride(1) == 1 && codes.dim(2) > 1; }

/// Packs a chunk of unquantized weights with contiguous k: a copy, because panels have that too.
void CopyTransposed(std::span<const ColumnRun> runs, int64_t expert, int64_t chunk, int bits,
                    uint8_t* out) {
  const int64_t size = bits / 8;
  const int64_t first_k = chunk * kChunkK;
  const int64_t rows = std::min<int64_t>(kChunkK, runs.front().part->weights->spec.k - first_k);
  if (rows < kChunkK || runs.back().to + runs.back().count < kBlockRows) {
    std::memset(out, 0, static_cast<size_t>(ChunkBytes(bits)));
  }
  for (const ColumnRun& run : runs) {
    const TensorView& codes = run.part->weights->codes;
    const int64_t column_bytes = codes.stride(2) * size;
    const uint8_t* from = ExpertData(codes, expert) + run.first * column_bytes + first_k * size;
    for (int64_t c = 0; c < run.count; ++c, from += run.part->step * column_bytes) {
      uint8_t* to = out + (run.to + c) * kChunkK * size;
      if (bits == 32) {
        for (int64_t k = 0; k < rows; ++k) std::memcpy(to + 4 * PlaceInSlice(k), from + 4 * k, 4);
      } else if (rows == kChunkK) {
        std::memcpy(to, from, 2 * kChunkK);
      } else {
        std::memcpy(to, from, static_cast<size_t>(2 * rows));
      }
    }
  }
}

/// Packs any other columns: gathers them element by element into a tile for PackTile.
void PackGathered(std::span<const ColumnRun> runs, int64_t expert, int64_t chunk, int bits,
                  uint8_t* out) {
  alignas(16) uint8_t tile[kMaxTileBytes];
  const auto [rows, size] = TileShapeOf(bits);
  std::memset(tile, 0, static_cast<size_t>(rows * kBlockRows * size));
  const int64_t first_row = chunk * rows;
  for (const ColumnRun& run : runs) {
    const TensorView& codes = run.part->weights->codes;
    const int64_t inside = std::min(rows, codes.dim(1) - first_row);
    for (int64_t c = 0; c < run.count; ++c) {
      const uint8_t* from =
          ExpertData(codes, expert) +
          (first_row * codes.stride(1) + (run.first + c * run.part->step) * codes.stride(2)) * size;
      uint8_t* to = tile + (run.to + c) * size;
      for (int64_t row = 0; row < inside; ++row) {
        std::memcpy(to, from, static_cast<size_t>(size));
        from += codes.stride(1) * size;
        to += kBlockRows * size;
      }
    }
  }
  PackTile(bits, tile, out);
}

/// Copies the words of a chunk, of codes or of metadata, to a tile of `count` rows of 16 columns.
/// Words past k keep what the tile holds.
void CopyWords(std::span<const ColumnRun> runs, int64_t expert,
               const TensorView QuantizedWeights::*array, int64_t first_row, int64_t count,
               uint32_t (*tile)[kBlockRows]) {
  for (const ColumnRun& run : runs) {
    const TensorView& words = (*run.part->weights).*array;
    const int64_t inside = std::min(count, words.dim(1) - first_row);
    const auto* from = reinterpret_cast<const uint32_t*>(ExpertData(words, expert)) +
                       first_row * words.dim(2) + run.first;
    for (int64_t row = 0; row < inside; ++row, from += words.dim(2)) {
      for (int64_t c = 0; c < run.count; ++c) tile[row][run.to + c] = from[c * run.part->step];
    }
  }
}

void PackSparse(std::span<const ColumnRun> runs, int64_t expert, int64_t chunk, uint32_t zero_code,
                uint8_t* out) {
  SparseTile tile = EmptySparseTile(zero_code);
  CopyWords(runs, expert, &QuantizedWeights::codes, chunk * kSparseTileValues, kSparseTileValues,
            tile.values);
  CopyWords(runs, expert, &QuantizedWeights::metadata, chunk * kSparseTileMetadata,
            kSparseTileMetadata, tile.metadata);
  PackSparseTile(tile, zero_code, out);
}

template <typename Word>
bool AllFinite(const uint8_t* chunk, int64_t count, Word exponent) {
  // No early exit, so that the compiler vectorises the loop.
  unsigned bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, chunk + i * int64_t{sizeof(Word)}, sizeof(Word));
    bad |= static_cast<unsigned>((word & exponent) == exponent);
  }
  return bad == 0;
}

}  // namespace

BlockColumns::BlockColumns(std::span<const WeightColumns> parts) : parts_(parts), starts_{0} {
  for (const WeightColumns& part : parts) starts_.push_back(starts_.back() + part.count);
}

int BlockColumns::Runs(int64_t block, ColumnRun (&runs)[kBlockRows]) const {
  const int64_t begin = block * kBlockRows;
  const int64_t end = std::min(begin + kBlockRows, n());
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), begin);
  auto part = static_cast<size_t>(after - starts_.begin()) - 1;
  int count = 0;
  for (int64_t column = begin; column < end; ++part) {
    const int64_t stop = std::min(end, starts_[part + 1]);
    if (stop == column) continue;  // A part without columns.
    const WeightColumns& from = parts_[part];
    runs[count++] = {&from, from.first + (column - starts_[part]) * from.step, stop - column,
                     column - begin};
    column = stop;
  }
  return count;
}

BlockPacker::BlockPacker(const BlockColumns& columns, int64_t block, int64_t expert)
    : count_(columns.Runs(block, runs_)), expert_(expert) {
  const QuantizedWeights& first = *runs_[0].part->weights;
  source_ = {ExpertData(first.codes, expert), first.spec.k, first.spec.n,
             GetFormatInfo(first.spec.format).bits};
  const bool transposed = std::all_of(runs().begin(), runs().end(), [](const ColumnRun& run) {
    return IsTransposed(run.part->weights->codes);
  });
  if (first.spec.sparsity == Sparsity::k24) {
    kind_ = Kind::kSparse;
    zero_code_ = CodeOfZero(CodeValues(first)).value_or(0);
  } else if (count_ == 1 && runs_[0].part->step == 1 && first.codes.IsContiguous()) {
    kind_ = Kind::kWhole;
  } else if (transposed && source_.bits >= 16) {
    kind_ = Kind::kTransposed;
  }
}

void BlockPacker::PackChunk(int64_t chunk, uint8_t* out) const {
  switch (kind_) {
    case Kind::kWhole:
      return cpu::PackChunk(source_, runs_[0].first, runs_[0].count, chunk, out);
    case Kind::kTransposed:
      return CopyTransposed(runs(), expert_, chunk, source_.bits, out);
    case Kind::kSparse:
      return PackSparse(runs(), expert_, chunk, zero_code_, out);
    case Kind::kGathered:
      return PackGathered(runs(), expert_, chunk, source_.bits, out);
  }
}

void BlockPacker::Prefetch(std::span<const BlockPacker> blocks, int64_t chunk) {
  const BlockPacker& first = blocks.front();
  int64_t columns = 0;
  for (const BlockPacker& block : blocks) {
    const bool next = block.kind_ == Kind::kWhole && block.runs_[0].part == first.runs_[0].part;
    if (!next) break;
    columns += block.runs_[0].count;
  }
  if (columns > 0) PrefetchChunk(first.source_, first.runs_[0].first, columns, chunk);
}

void BlockPacker::PackGroups(const TensorView QuantizedWeights::*array, int64_t padded_groups,
                             uint8_t* out) const {
  const int64_t size = DTypeBytes(((*runs_[0].part->weights).*array).dtype());
  std::memset(out, 0, static_cast<size_t>(padded_groups * kBlockRows * size));
  for (const ColumnRun& run : runs()) {
    const TensorView& view = (*run.part->weights).*array;
    const GroupSource source{ExpertData(view, expert_), size, view.dim(1), view.dim(2)};
    if (run.part->step == 1) {
      cpu::PackGroups(source, run.first, run.count, out + run.to * size);
      continue;
    }
    for (int64_t c = 0; c < run.count; ++c) {
      cpu::PackGroups(source, run.first + c * run.part->step, 1, out + (run.to + c) * size);
    }
  }
}

bool ChunkIsFinite(Format format, const uint8_t* chunk) {
  constexpr int64_t kCount = int64_t{kBlockRows} * kChunkK;
  switch (UnquantizedDType(format)) {
    case DType::kBf16:
      return AllFinite<uint16_t>(chunk, kCount, 0x7f80u);
    case DType::kF16:
      return AllFinite<uint16_t>(chunk, kCount, 0x7c00u);
    default:
      return AllFinite<uint32_t>(chunk, kCount, 0x7f800000u);
  }
}

}  // namespace marlin::cpu
