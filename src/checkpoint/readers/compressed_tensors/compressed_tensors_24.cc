#include "checkpoint/readers/compressed_tensors/compressed_tensors_24.h"

#include <fmt/core.h>

#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "base/checked.h"
#include "base/macros.h"
#include "checkpoint/codes/unpack.h"
#include "layout/sparse_24.h"

namespace marlin {
namespace {

constexpr int kKept = 2;  // Numbers that a block of four keeps.

/// The bits of one row of a bitmask, those past its columns cleared.
class RowBits {
 public:
  RowBits(const std::byte* bits, int64_t columns) : bits_(bits), columns_(columns) {}

  uint8_t ByteAt(int64_t index) const {
    const int64_t left = columns_ - 8 * index;
    const auto byte = static_cast<uint8_t>(bits_[index]);
    return left >= 8 ? byte : static_cast<uint8_t>(byte & ((1u << left) - 1));
  }

  bool At(int64_t column) const {
    return (static_cast<uint8_t>(bits_[column / 8]) >> (column % 8) & 1) != 0;
  }

 private:
  const std::byte* bits_;
  int64_t columns_;
};

/// Reads and checks the parts of a bitmask tensor one after the other.
class BitmaskFinder {
 public:
  BitmaskFinder(BitmaskFormat format, ModuleTensorFinder* finder)
      : format_(format), finder_(*finder) {}

  Result<BitmaskTensor> Find(std::initializer_list<DType> dtypes) {
    MARLIN_ASSIGN_OR_RETURN(found_.values_tensor,
                            finder_.Need(ModulePart::kCodes, ".compressed", dtypes));
    found_.dtype = finder_.TypeOf(found_.values_tensor);
    found_.values = finder_.Data(found_.values_tensor);
    MARLIN_RETURN_IF_ERROR(FindShape());
    MARLIN_RETURN_IF_ERROR(FindBits());
    MARLIN_RETURN_IF_ERROR(CountBits());
    if (format_ == BitmaskFormat::kSparse24) {
      MARLIN_RETURN_IF_ERROR(CheckBlocks());
      found_.blocks_in_rows = found_.columns % kSparseBlock == 0;
    } else {
      MARLIN_RETURN_IF_ERROR(CheckOffsets());
    }
    return std::move(found_);
  }

 private:
  Status FindShape() {
    MARLIN_ASSIGN_OR_RETURN(const size_t shape,
                            finder_.Need(ModulePart::kCodes, ".shape", {DType::kI64}));
    const int64_t rank = finder_.ShapeOf(shape).ElementCount();
    const bool matrix = rank == 2 || format_ == BitmaskFormat::kAny;
    if (rank < 1 || rank > kMaxRank || !matrix) {
      return finder_.Malformed(".shape", fmt::format("{} numbers are not a shape", rank));
    }
    Checked rows(1);
    for (int64_t i = 0; i < rank; ++i) {
      int64_t dim = 0;
      std::memcpy(&dim, finder_.Data(shape) + i * 8, sizeof(dim));
      if (dim < 1 || dim > INT32_MAX) {
        return finder_.Malformed(".shape", fmt::format("{} at [{}] is not a dimension", dim, i));
      }
      found_.shape.Append(dim);
      if (i + 1 < rank) rows = rows * Checked(dim);
    }
    found_.columns = found_.shape[found_.shape.rank() - 1];
    const std::optional<int64_t> bytes =
        (rows * Checked(found_.columns) * Checked(DTypeBytes(found_.dtype))).Take();
    if (!bytes) return finder_.Malformed(".shape", found_.shape.ToString() + " is too large");
    found_.rows = *rows.Take();
    return {};
  }

  Status FindBits() {
    Shape shape = found_.shape;
    shape[shape.rank() - 1] = CeilDivide(found_.columns, 8);
    MARLIN_ASSIGN_OR_RETURN(const size_t bits,
                            finder_.Need(ModulePart::kCodes, ".bitmask", {DType::kU8}, shape));
    found_.bits = finder_.Data(bits);
    return {};
  }

  RowBits RowAt(int64_t row) const {
    const int64_t bytes = CeilDivide(found_.columns, 8);
    return {found_.bits + row * bytes, found_.columns};
  }

  Status CountBits() {
    found_.starts.reserve(static_cast<size_t>(found_.rows));
    int64_t set = 0;
    for (int64_t row = 0; row < found_.rows; ++row) {
      found_.starts.push_back(set);
      const RowBits bits = RowAt(row);
      for (int64_t i = 0; i < CeilDivide(found_.columns, 8); ++i) {
        set += std::popcount(bits.ByteAt(i));
      }
    }
    const Shape& values = finder_.ShapeOf(found_.values_tensor);
    const bool sparse24 = format_ == BitmaskFormat::kSparse24;
    const Shape expected = sparse24 ? Shape{found_.rows, found_.columns / 2} : Shape{set};
    if (values == expected && (!sparse24 || found_.columns % 2 == 0)) {
      found_.count = values.ElementCount();
      if (set == found_.count) return {};
    }
    return finder_.Malformed(
        ".compressed", fmt::format("{} does not hold what {} bits select of {}", values.ToString(),
                                   set, found_.shape.ToString()));
  }

  // Blocks follow each other through the whole matrix, whose rows need not be whole blocks.
  Status CheckBlocks() const {
    int kept = 0;
    int64_t index = 0;
    for (int64_t row = 0; row < found_.rows; ++row) {
      const RowBits bits = RowAt(row);
      for (int64_t k = 0; k < found_.columns; ++k) {
        kept += bits.At(k) ? 1 : 0;
        if (++index % kSparseBlock != 0) continue;
        if (kept != kKept) {
          return finder_.Malformed(
              ".bitmask",
              fmt::format("the block of four that ends at [{}, {}] keeps {}", row, k, kept));
        }
        kept = 0;
      }
    }
    if (index % kSparseBlock == 0) return {};
    return finder_.Malformed(".shape",
                             found_.shape.ToString() + " does not consist of blocks of four");
  }

  // Sums along the first dimension.
  Status CheckOffsets() const {
    Shape shape;
    for (int i = 0; i + 1 < found_.shape.rank(); ++i) shape.Append(found_.shape[i]);
    MARLIN_ASSIGN_OR_RETURN(const size_t offsets,
                            finder_.Need(ModulePart::kCodes, ".row_offsets", {DType::kI64}, shape));
    const int64_t rest = found_.shape.rank() < 2 ? 1 : found_.rows / found_.shape[0];
    std::vector<int64_t> sums(static_cast<size_t>(rest), 0);
    for (int64_t row = 0; row < found_.rows; ++row) {
      int64_t offset = 0;
      std::memcpy(&offset, finder_.Data(offsets) + row * 8, sizeof(offset));
      int64_t& sum = sums[static_cast<size_t>(row % rest)];
      if (offset != sum) {
        return finder_.Malformed(".row_offsets",
                                 fmt::format("{} at row {}, the bits say {}", offset, row, sum));
      }
      const int64_t end =
          row + 1 < found_.rows ? found_.starts[static_cast<size_t>(row + 1)] : found_.count;
      sum += end - found_.starts[static_cast<size_t>(row)];
    }
    return {};
  }

  BitmaskFormat format_;
  ModuleTensorFinder& finder_;
  BitmaskTensor found_;
};

/// The nibble of a block by its four bits; 0, which is none, unless two are set.
constexpr std::array<uint8_t, 16> kPatternNibbles = {0, 0,  0,  4, 0,  8, 9, 0,
                                                     0, 12, 13, 0, 14, 0, 0, 0};
constexpr uint8_t kPaddingNibble = 4;

// --- marlin-24 ----------------------------------------------------------------------------------

constexpr int64_t kTile = 16;          // Codes are in tiles of 16 k by 16 columns,
constexpr int64_t kChunkColumns = 64;  // of which four are permuted together.
constexpr int64_t kMarlinGroup = 128;  // The only size of groups.
constexpr int64_t kMetaRun = 16;       // k of one word of metadata.

/// The column within eight that place p of eight scales belongs to is kScaleColumns[p].
constexpr std::array<int64_t, 8> kScaleColumns = {0, 4, 1, 5, 2, 6, 3, 7};

/// Where marlin-24 stores the parts of W^T [n, k].
struct Marlin24 {
  int64_t k = 0;
  int64_t n = 0;
  int bits = 4;
  int64_t groups = 1;
  const std::byte* codes = nullptr;
  const std::byte* meta = nullptr;
  const std::byte* scales = nullptr;

  /// Kept code `index` of k / 2 of a column.
  uint32_t CodeAt(int64_t index, int64_t column) const {
    const int64_t row = index % kTile;
    const int64_t c = column % kTile;
    // The codes that a thread of a warp takes: pairs of rows, 8 rows apart, of two columns 4 apart.
    const int64_t thread = 4 * (column % kChunkColumns / 8) + row % 8 / 2;
    int64_t place = thread * 32 + c % 4 * 8 + c % 8 / 4 * 4 + row / 8 * 2 + row % 2;
    // Codes at even places precede those at odd ones.
    const int64_t per_word = 32 / bits;
    const int64_t in_word = place % per_word;
    place += in_word / 2 + in_word % 2 * (per_word / 2) - in_word;
    const int64_t code =
        (index / kTile * n + column / kChunkColumns * kChunkColumns) * kTile + place;
    return WordAt(codes, code / per_word) >> (code % per_word * bits) & ((1u << bits) - 1);
  }

  /// The four nibbles of 16 k from 16 * run on, lowest first: the order of CUTLASS's column-major
  /// metadata with two interleaved columns.
  uint32_t NibblesAt(int64_t run, int64_t column) const {
    const int64_t r = column % 64;
    int64_t row = column - r + r % 2 * 2 + r % 8 / 4 + r % 4 / 2 * 32 + r / 8 * 4;
    int64_t half = run % 2;
    if (row % 2 != half) {  // Blocks of 2 x 2 are transposed.
      row += half - row % 2;
      half = 1 - half;
    }
    uint16_t nibbles = 0;
    std::memcpy(&nibbles, meta + ((run / 2 * n + row) * 2 + half) * 2, sizeof(nibbles));
    return nibbles;
  }

  void FillScales(uint16_t* out) const {
    // The writer compares the size of groups with k / 2, the rows that it stores.
    const bool permuted = groups > 1 && kMarlinGroup < k / 2;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t p = 0; p < n; ++p) {
        const int64_t column = permuted ? p - p % 8 + kScaleColumns[static_cast<size_t>(p % 8)] : p;
        std::memcpy(out + g * n + column, scales + (g * n + p) * 2, 2);
      }
    }
  }
};

/// Finds the tensors and checks that their shapes agree.
Result<Marlin24> FindMarlin24(int64_t bits, ModuleTensorFinder* finder) {
  MARLIN_ASSIGN_OR_RETURN(const size_t codes,
                          finder->Need(ModulePart::kCodes, ".weight_packed", {DType::kI32}));
  MARLIN_ASSIGN_OR_RETURN(const size_t meta,
                          finder->Need(ModulePart::kMetadata, ".meta", {DType::kI16}));
  MARLIN_ASSIGN_OR_RETURN(const size_t scales,
                          finder->Need(ModulePart::kScales, ".scale_packed", {DType::kF16}));
  const Shape& shape = finder->ShapeOf(meta);
  const std::optional<int64_t> k =
      shape.rank() == 2 ? (Checked(shape[0]) * Checked(kSparseRun)).Take() : std::nullopt;
  if (!k || *k < kSparseRun || shape[1] < 2 * kChunkColumns ||
      shape[1] % (2 * kChunkColumns) != 0) {
    return finder->Malformed(
        ".meta", fmt::format("{} is not [k / 32, 2 n] with n a multiple of 64", shape.ToString()));
  }
  Marlin24 source{.k = *k, .n = shape[1] / 2};
  const Shape& packed = finder->ShapeOf(codes);
  const bool matrix = packed.rank() == 2 && packed[0] == shape[0];
  if (matrix && packed[1] == source.n * 4) source.bits = 8;
  if (!matrix || packed[1] != source.n * source.bits / 2) {
    return finder->Malformed(".weight_packed", fmt::format("{} does not fit meta {}",
                                                           packed.ToString(), shape.ToString()));
  }
  if (bits != 0 && bits != source.bits) {
    return finder->Malformed(".weight_packed",
                             fmt::format("{} holds codes of {} bits, the configuration says {}",
                                         packed.ToString(), source.bits, bits));
  }
  const Shape& scale_shape = finder->ShapeOf(scales);
  source.groups = scale_shape.rank() == 2 ? scale_shape[0] : 0;
  const bool fits =
      source.groups == 1 || (source.groups > 1 && source.k == source.groups * kMarlinGroup);
  if (!fits || scale_shape[1] != source.n) {
    return finder->Malformed(
        ".scale_packed",
        fmt::format("{} does not fit [{}, {}]", scale_shape.ToString(), source.n, source.k));
  }
  source.codes = finder->Data(codes);
  source.meta = finder->Data(meta);
  source.scales = finder->Data(scales);
  return source;
}

}  // namespace

void BitmaskTensor::Expand(int64_t row, std::byte* out) const {
  const int64_t width = DTypeBytes(dtype);
  const RowBits row_bits(bits + row * CeilDivide(columns, 8), columns);
  int64_t next = starts[static_cast<size_t>(row)];
  std::memset(out, 0, static_cast<size_t>(columns * width));
  for (int64_t k = 0; k < columns; ++k) {
    if (!row_bits.At(k)) continue;
    if (next >= count) return;  // Checked at opening: the file has changed since.
    std::memcpy(out + k * width, values + next++ * width, static_cast<size_t>(width));
  }
}

KeptRows BitmaskTensor::Kept() const {
  KeptRows kept;
  const int64_t padded = RoundUp(columns, kSparseRun);
  kept.codes = [data = values, half = columns / 2, padded](int64_t row, uint8_t* codes) {
    std::memcpy(codes, data + row * half, static_cast<size_t>(half));
    std::memset(codes + half, 0, static_cast<size_t>(padded / 2 - half));
  };
  kept.positions = [data = bits, k = columns, padded](int64_t row, uint8_t* nibbles) {
    const RowBits row_bits(data + row * CeilDivide(k, 8), k);
    for (int64_t b = 0; b < padded / kSparseBlock; ++b) {
      nibbles[b] =
          b * kSparseBlock >= k
              ? kPaddingNibble
              : kPatternNibbles[static_cast<size_t>(row_bits.ByteAt(b / 2) >> (b % 2 * 4) & 15)];
    }
  };
  return kept;
}

Result<BitmaskTensor> FindBitmask(BitmaskFormat format, std::initializer_list<DType> dtypes,
                                  ModuleTensorFinder* finder) {
  return BitmaskFinder(format, finder).Find(dtypes);
}

Status AddMarlin24(const std::string& name, int64_t bits, ModuleTensorFinder* finder,
                   ListedReader* reader) {
  MARLIN_ASSIGN_OR_RETURN(const Marlin24 source, FindMarlin24(bits, finder));
  RowWeights rows;
  rows.spec = {.format = source.bits == 4 ? Format::kS4 : Format::kS8,
               .k = source.k,
               .n = source.n,
               .group_size = source.groups == 1 ? source.k : kMarlinGroup,
               .sparsity = Sparsity::k24};
  rows.kept.codes = [source](int64_t column, uint8_t* out) {
    // Offset binary, which s4 has too; s8 is in two's complement.
    const uint32_t flip = source.bits == 8 ? 0x80 : 0;
    for (int64_t i = 0; i < source.k / 2; ++i) {
      out[i] = static_cast<uint8_t>(source.CodeAt(i, column) ^ flip);
    }
  };
  rows.kept.positions = [source](int64_t column, uint8_t* out) {
    for (int64_t run = 0; run < source.k / kMetaRun; ++run) {
      const uint32_t nibbles = source.NibblesAt(run, column);
      for (int i = 0; i < 4; ++i) *out++ = static_cast<uint8_t>(nibbles >> (4 * i) & 15);
    }
  };
  rows.more = [source](WeightsBuffer* buffer) {
    source.FillScales(static_cast<uint16_t*>(buffer->scales));
  };
  AddRows(name, std::move(rows), finder, reader);
  return {};
}

}  // namespace marlin
