#include "backends/metal/gemm/prepared_strips.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/checked.h"
#include "base/macros.h"
#include "layout/packing.h"
#include "layout/parameters.h"
#include "layout/sparse_24.h"

namespace marlin::metal {
namespace {

using kernels::kBlockK;
using kernels::kChunkK;
using kernels::kLanes;
using kernels::kStripOutputs;

constexpr int64_t kPartAlignment = 256;

const uint8_t* ExpertData(const TensorView& view, int64_t experts, int64_t expert) {
  return view.As<uint8_t>() + view.ByteCount() / experts * expert;
}

/// The unpacked codes of a strip: [8 columns][k rounded up to chunks].
template <typename Code>
struct StripCodes {
  std::vector<Code> codes;
  int64_t stride;

  StripCodes(int64_t chunks)  // NOLINT(google-explicit-constructor)
      : codes(static_cast<size_t>(kStripOutputs * chunks * kChunkK)), stride(chunks * kChunkK) {}
  Code& At(int64_t column, int64_t k) { return codes[static_cast<size_t>(column * stride + k)]; }
};

/// Calls place(lane, s, j, column, k) for every pair of codes in a chunk.
template <typename Place>
void ForEachPair(int64_t chunk, const Place& place) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const int column = kernels::FragmentColumn(lane);
    for (int s = 0; s < kChunkK / kBlockK; ++s) {
      const int64_t k = chunk * kChunkK + s * kBlockK + 4 * kernels::FragmentRow(lane);
      for (int j = 0; j < 4; ++j) place(lane, s, j, column, k + j);
    }
  }
}

/// Codes of up to 16 bits.
template <typename Code>
void PackChunks(int bits, kernels::CodeKind kind, int64_t chunks, StripCodes<Code>& from,
                uint32_t* to) {
  const uint32_t low_mask = bits == 3 ? 3 : ~uint32_t{0};
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    uint32_t* const words = to + chunk * (ChunkBytes(bits) / 4);
    ForEachPair(chunk, [&](int lane, int s, int j, int column, int64_t k) {
      const uint32_t first = from.At(column, k);
      const uint32_t second = from.At(column + 1, k);
      const PairPlace place = PlaceOf(bits, s, j);
      uint32_t& word = words[WordOffset(bits, lane, place.word)];
      if (bits == 4) {
        word |= PairOf4Bits(kind, j, first, second);
        return;
      }
      word |= ((first & low_mask) | (second & low_mask) << 16) << place.bit;
      if (bits != 3) return;
      const PairPlace high = HighBitOf(s, j);
      words[WordOffset(bits, lane, high.word)] |= (first >> 2 | second >> 2 << 16) << high.bit;
    });
  }
}

void PackWideChunks(int64_t chunks, StripCodes<uint32_t>& from, uint32_t* to) {
  constexpr int kBits = 32;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    uint32_t* const words = to + chunk * (ChunkBytes(kBits) / 4);
    ForEachPair(chunk, [&](int lane, int s, int j, int column, int64_t k) {
      const int word = 2 * (4 * s + j);
      words[WordOffset(kBits, lane, word)] = from.At(column, k);
      words[WordOffset(kBits, lane, word + 1)] = from.At(column + 1, k);
    });
  }
}

/// The code of value 0 of 2:4 weights, with which their codes are XORed; 0 for others.
uint32_t ZeroCodeOf(const QuantizedWeights& weights) {
  if (weights.spec.sparsity == Sparsity::kDense) return 0;
  return CodeOfZero(CodeValues(weights)).value_or(0);
}

/// The kept codes and the metadata of a block of 4 k in two adjacent columns, 8 and 4 bits each.
struct KeptPair {
  uint32_t codes;
  uint32_t metadata = 0x44;
};

/// The kept codes and metadata of one matrix of 2:4 weights.
struct SparseMatrix {
  const uint32_t* codes;
  const uint32_t* nibbles;
  int64_t rows;  ///< Words of metadata along k.
  int64_t n;
  uint32_t padding;  ///< Codes of value 0.

  KeptPair At(int64_t block, int64_t column) const {
    KeptPair kept{padding};
    for (int64_t c = 0; c < 2 && column + c < n && block / 8 < rows; ++c) {
      const uint32_t pair = codes[block / 4 * n + column + c] >> (block % 4 * 8) & 0xffu;
      const uint32_t nibble = nibbles[block / 8 * n + column + c] >> (block % 8 * 4) & 15u;
      kept.codes = (kept.codes & ~(0xffu << (8 * c))) | pair << (8 * c);
      kept.metadata = (kept.metadata & ~(15u << (4 * c))) | nibble << (4 * c);
    }
    return kept;
  }
};

/// One strip of 2:4 weights of 4 bits.
void PackSparseChunks(const QuantizedWeights& weights, int64_t expert, int64_t strip,
                      int64_t chunks, uint32_t* to) {
  const WeightsSpec& spec = weights.spec;
  const uint32_t flips = ZeroCodeOf(weights) * 0x1111u;
  const SparseMatrix matrix = {
      reinterpret_cast<const uint32_t*>(ExpertData(weights.codes, spec.experts, expert)),
      reinterpret_cast<const uint32_t*>(ExpertData(weights.metadata, spec.experts, expert)),
      MetadataWordsAlongK(spec.k), spec.n, flips};
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    uint32_t* const words = to + chunk * (ChunkBytes(kernels::kSparse4) / 4);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t first = strip * kStripOutputs + kernels::FragmentColumn(lane);
      for (int s = 0; s < kChunkK / kBlockK; ++s) {
        const int64_t block =
            (chunk * kChunkK + s * kBlockK) / kSparseBlock + kernels::FragmentRow(lane);
        const KeptPair kept = matrix.At(block, first);
        words[WordOffset(kernels::kSparse4, lane, s / 2)] |= (kept.codes ^ flips) << (16 * (s % 2));
        words[WordOffset(kernels::kSparse4, lane, 2)] |= kept.metadata << (8 * s);
      }
    }
  }
}

/// Columns [first, first + 8) of a [k, n] matrix whose elements are not packed.
template <typename Code>
StripCodes<Code> TakeColumns(const void* data, const WeightsSpec& spec, int64_t first,
                             int64_t chunks) {
  StripCodes<Code> codes(chunks);
  const int64_t columns = std::min<int64_t>(kStripOutputs, spec.n - first);
  for (int64_t k = 0; k < spec.k; ++k) {
    const Code* row = static_cast<const Code*>(data) + k * spec.n + first;
    for (int64_t c = 0; c < columns; ++c) codes.At(c, k) = row[c];
  }
  return codes;
}

/// The same for packed codes.
StripCodes<uint8_t> UnpackStrip(const void* data, const WeightsSpec& spec, int bits, int64_t first,
                                int64_t chunks) {
  StripCodes<uint8_t> codes(chunks);
  const int64_t columns = std::min<int64_t>(kStripOutputs, spec.n - first);
  UnpackColumns(bits, static_cast<const uint32_t*>(data) + first, spec.n,
                {codes.codes.data(), codes.stride, spec.k, columns});
  const auto flip = static_cast<uint8_t>(CodeFlipOf(spec.format));
  for (int64_t c = 0; c < columns; ++c) {
    uint8_t* const column = &codes.At(c, 0);
    for (int64_t k = 0; flip != 0 && k < spec.k; ++k) column[k] ^= flip;
    // UnpackColumns also writes the padding of the last word; the layout wants code 0 beyond k.
    std::fill(column + spec.k, column + codes.stride, uint8_t{0});
  }
  return codes;
}

/// Copies one strip of [groups, n] into [strips][groups][8].
void PackGroups(const uint8_t* from, int64_t element_bytes, int64_t groups, int64_t n,
                int64_t strip, uint8_t* to) {
  const int64_t first = strip * kStripOutputs;
  const int64_t columns = std::min<int64_t>(kStripOutputs, n - first);
  uint8_t* at = to + strip * groups * kStripOutputs * element_bytes;
  for (int64_t group = 0; group < groups; ++group) {
    std::memcpy(at, from + (group * n + first) * element_bytes,
                static_cast<size_t>(columns * element_bytes));
    at += kStripOutputs * element_bytes;
  }
}

/// Whether all zero points are integers small enough for sums with the bias of codes.
bool HasIntegerZeros(const QuantizedWeights& weights) {
  const WeightsSpec& spec = weights.spec;
  if (!spec.has_zeros || CodeKindOf(spec.format) != kernels::kCodesInteger) return false;
  constexpr float kMost = 0x1p20F;
  const int64_t count = weights.zeros.ElementCount();
  for (int64_t i = 0; i < count; ++i) {
    const float zero = ParameterAt(weights.zeros, i);
    if (!(std::fabs(zero) <= kMost) || zero != std::trunc(zero)) return false;
  }
  return true;
}

}  // namespace

DType ExtraDType(const WeightsSpec& spec) {
  return spec.has_biases ? BiasDType(spec.scale_type) : ScaleDType(spec.zero_type);
}

int64_t ExtraBytes(const WeightsSpec& spec) {
  return spec.has_zeros || spec.has_biases ? DTypeBytes(ExtraDType(spec)) : 0;
}

Result<std::shared_ptr<PreparedStrips>> PreparedStrips::Make(const QuantizedWeights& weights,
                                                             const Backend* backend,
                                                             const std::shared_ptr<Driver>& driver,
                                                             ThreadPool& pool) {
  const WeightsSpec& spec = weights.spec;
  const FormatInfo& info = GetFormatInfo(spec.format);
  auto strips = std::make_shared<PreparedStrips>();
  strips->spec = spec;
  strips->traits.sparse = spec.sparsity == Sparsity::k24;
  strips->backend = backend;
  strips->driver_ = driver;
  strips->strips_ = CeilDivide(spec.n, int64_t{kStripOutputs});
  strips->chunks_ = CeilDivide(spec.k, int64_t{kChunkK});
  const int64_t group_elements =
      info.quantized ? strips->strips_ * GroupCount(spec) * kStripOutputs : 0;
  const int64_t extra_bytes = ExtraBytes(spec);
  const bool table = info.quantized && CodeKindOf(spec.format) == kernels::kCodesTable;
  const auto padded = [](int64_t size) { return RoundUp(size, kPartAlignment); };
  strips->codes_bytes_ = padded(strips->strips_ * strips->chunks_ * ChunkBytes(CodeBitsOf(spec)));
  strips->scales_bytes_ = padded(group_elements * DTypeBytes(ScaleDType(spec.scale_type)));
  strips->extras_bytes_ = padded(group_elements * extra_bytes);
  strips->table_bytes_ = table ? int64_t{sizeof(float)} << info.bits : 0;
  strips->scales_offset_ = spec.experts * strips->codes_bytes_;
  strips->extras_offset_ = strips->scales_offset_ + spec.experts * strips->scales_bytes_;
  strips->table_offset_ = strips->extras_offset_ + spec.experts * strips->extras_bytes_;
  strips->bytes = strips->table_offset_ + strips->table_bytes_;
  MARLIN_ASSIGN_OR_RETURN(void* data,
                          driver->Allocate(std::max<int64_t>(strips->bytes, kPartAlignment)));
  strips->data_ = static_cast<uint8_t*>(data);
  strips->integer_zeros_ = HasIntegerZeros(weights);
  strips->global_scales_.assign(static_cast<size_t>(spec.experts), 1.0F);
  for (int64_t expert = 0; spec.has_global_scale && expert < spec.experts; ++expert) {
    strips->global_scales_[static_cast<size_t>(expert)] = weights.global_scale.As<float>()[expert];
  }
  std::memset(data, 0, static_cast<size_t>(std::max<int64_t>(strips->bytes, kPartAlignment)));
  if (table) {
    const std::span<const float> values = CodeValues(weights);
    const size_t flips = ZeroCodeOf(weights);
    auto* const stored = reinterpret_cast<float*>(strips->data_ + strips->table_offset_);
    for (size_t i = 0; i < values.size(); ++i) stored[i] = values[i ^ flips];
  }
  if (spec.k > 0) {
    pool.Run(spec.experts * strips->strips_, [&](int64_t task, int) {
      strips->PackStrip(weights, task / strips->strips_, task % strips->strips_);
    });
  }
  return strips;
}

PreparedStrips::~PreparedStrips() {
  if (data_ != nullptr) driver_->Free(data_);
}

std::shared_ptr<PreparedStrips> PreparedStrips::WithoutMemory() const {
  std::shared_ptr<PreparedStrips> shapes(new PreparedStrips(*this));
  shapes->data_ = nullptr;
  return shapes;
}

void PreparedStrips::PackStrip(const QuantizedWeights& weights, int64_t expert,
                               int64_t strip) const {
  const int bits = GetFormatInfo(spec.format).bits;
  const int64_t first = strip * kStripOutputs;
  const uint8_t* from = ExpertData(weights.codes, spec.experts, expert);
  uint8_t* const codes =
      data_ + expert * codes_bytes_ + strip * chunks_ * ChunkBytes(CodeBitsOf(spec));
  auto* const to = reinterpret_cast<uint32_t*>(codes);
  if (spec.sparsity == Sparsity::k24) {
    PackSparseChunks(weights, expert, strip, chunks_, to);
  } else if (bits == 32) {
    StripCodes<uint32_t> columns = TakeColumns<uint32_t>(from, spec, first, chunks_);
    PackWideChunks(chunks_, columns, to);
  } else if (bits == 16) {
    StripCodes<uint16_t> columns = TakeColumns<uint16_t>(from, spec, first, chunks_);
    PackChunks(bits, CodeKindOf(spec.format), chunks_, columns, to);
  } else {
    StripCodes<uint8_t> columns = UnpackStrip(from, spec, bits, first, chunks_);
    PackChunks(bits, CodeKindOf(spec.format), chunks_, columns, to);
  }
  const auto pack_groups = [&](const TensorView& view, int64_t offset, int64_t expert_bytes) {
    if (view.empty()) return;
    PackGroups(ExpertData(view, spec.experts, expert), DTypeBytes(view.dtype()), GroupCount(spec),
               spec.n, strip, data_ + offset + expert * expert_bytes);
  };
  if (!GetFormatInfo(spec.format).quantized) return;
  pack_groups(weights.scales, scales_offset_, scales_bytes_);
  pack_groups(spec.has_zeros ? weights.zeros : weights.biases, extras_offset_, extras_bytes_);
}

}  // namespace marlin::metal
