// AWQ, as AutoAWQ, GPTQModel and llm-awq write it, 4 bits. The shapes tell three packings apart:
//   gemm       X.qweight i32 [k, n / 8], X.qzeros i32 [groups, n / 8], X.scales [groups, n]: packed
//              along n, nibble i of a word holding column kOrder[i]
//   gemv       X.qweight i32 [n, k / 8], X.qzeros i32 [n, w], X.scales [n, 8 w]: packed along k in
//              natural order, groups padded to a width w
//   gemv_fast  X.qweight i16 [n / 4, k], X.scales and X.qzeros [8 w, n]; the latter hold minus the
//              product of scale and zero: additive biases
#include <fmt/core.h>

#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/scalars.h"
#include "checkpoint/codes/unpack.h"
#include "checkpoint/listed_reader.h"
#include "recipe/model_config.h"

namespace marlin {
namespace {

constexpr std::array<int, 8> kOrder = {0, 2, 4, 6, 1, 3, 5, 7};
constexpr int64_t kNibblesPerWord = 8;  // In a word.

struct AwqModule {
  int64_t k = 0;
  int64_t n = 0;
  int64_t groups = 0;
  int64_t padded_groups = 0;
  size_t codes = 0;
  size_t scales = 0;
  size_t zeros = 0;
};

// Words of packed zeros of a row, as the gemv kernels pad them.
int64_t ZerosWidth(int64_t k, int64_t group_size) {
  const int64_t multiple = group_size >= 128 ? 1 : (group_size == 64 ? 2 : 4);
  return RoundUp(CeilDivide(k / group_size, kNibblesPerWord), multiple);
}

int NibbleOf(uint32_t word, int64_t index) {
  return static_cast<int>((word >> (4 * (index % kNibblesPerWord))) & 15u);
}

// Words of eight nibbles in kOrder, to the same words in natural order.
uint32_t NaturalOrder(uint32_t word) {
  uint32_t natural = 0;
  for (size_t i = 0; i < kOrder.size(); ++i) {
    natural |= ((word >> (4 * i)) & 15u) << (4 * kOrder[i]);
  }
  return natural;
}

// Words of `rows` rows of k, up to eight, as words of eight columns: an 8 x 8 transposition of
// nibbles. The words of a column are `stride` apart.
std::array<uint32_t, kNibblesPerWord> TransposeNibbles(const std::byte* data, int64_t first,
                                                       int64_t stride, int64_t rows) {
  std::array<uint32_t, kNibblesPerWord> columns{};
  for (int64_t r = 0; r < rows; ++r) {
    const uint32_t word = WordAt(data, first + r * stride);
    for (size_t i = 0; i < kOrder.size(); ++i) {
      columns[static_cast<size_t>(kOrder[i])] |= ((word >> (4 * i)) & 15u) << (4 * r);
    }
  }
  return columns;
}

Status FillGemm(const TensorStore& store, const AwqModule& m, WeightsBuffer* buffer,
                ThreadPool& pool) {
  const int64_t columns = m.n / kNibblesPerWord;  // Words of a row.
  auto* out = static_cast<uint32_t*>(buffer->codes);
  pool.Run(CeilDivide(m.k, kNibblesPerWord), [&](int64_t row, int) {
    const int64_t rows = std::min(kNibblesPerWord, m.k - row * kNibblesPerWord);
    for (int64_t column = 0; column < columns; ++column) {
      const std::array<uint32_t, kNibblesPerWord> words = TransposeNibbles(
          store.Data(m.codes), row * kNibblesPerWord * columns + column, columns, rows);
      std::memcpy(out + row * m.n + column * kNibblesPerWord, words.data(), sizeof(words));
    }
  });
  std::memcpy(buffer->scales, store.Data(m.scales),
              static_cast<size_t>(buffer->weights.scales.ByteCount()));
  StoreZeros(
      [&](int64_t column, int64_t group) {
        const int64_t word = group * columns + column / kNibblesPerWord;
        return NibbleOf(NaturalOrder(WordAt(store.Data(m.zeros), word)), column);
      },
      *buffer);
  return {};
}

Status FillGemv(const TensorStore& store, const AwqModule& m, WeightsBuffer* buffer,
                ThreadPool& pool) {
  PackDenseRows({store.Data(m.codes), m.k / 2}, *buffer, pool);
  auto* scales = static_cast<std::byte*>(buffer->scales);
  for (int64_t g = 0; g < m.groups; ++g) {
    for (int64_t c = 0; c < m.n; ++c) {
      std::memcpy(scales + (g * m.n + c) * 2, store.Data(m.scales) + (c * m.padded_groups + g) * 2,
                  2);
    }
  }
  StoreZeros(
      [&](int64_t row, int64_t group) {
        const int64_t word = row * m.padded_groups / kNibblesPerWord + group / kNibblesPerWord;
        return NibbleOf(WordAt(store.Data(m.zeros), word), group);
      },
      *buffer);
  return {};
}

Status FillGemvFast(const TensorStore& store, const AwqModule& m, WeightsBuffer* buffer,
                    ThreadPool& pool) {
  // Blocks of 4 columns and 64 k hold 32 bytes of each column in turn. Of 32 k of a column, the
  // nibble (g, w, i) of [4][2][4] is k = 8 i + 2 g + w.
  constexpr int64_t kBlockK = 64;
  const auto unpack = [&](int64_t row, uint8_t* codes) {
    for (int64_t block = 0; block < m.k / kBlockK; ++block) {
      const std::byte* bytes = store.Data(m.codes) + row / 4 * m.k * 2 + block * 128 + row % 4 * 32;
      for (int64_t p = 0; p < kBlockK; ++p) {
        const auto byte = static_cast<uint8_t>(bytes[p / 2]);
        const int64_t place = p % 32;
        const int64_t k = p / 32 * 32 + place % 4 * 8 + place / 8 * 2 + place / 4 % 2;
        codes[block * kBlockK + k] = static_cast<uint8_t>(p % 2 == 0 ? byte & 15u : byte >> 4);
      }
    }
  };
  PackByteRows(unpack, *buffer, pool);
  const auto bytes = static_cast<size_t>(buffer->weights.scales.ByteCount());
  std::memcpy(buffer->scales, store.Data(m.scales), bytes);
  std::memcpy(buffer->biases, store.Data(m.zeros), bytes);
  return {};
}

class AwqFinder {
 public:
  AwqFinder(const TensorStore& store, int64_t group_size, const std::string& base)
      : finder_(store, base), group_size_(group_size) {}

  Status AddTo(ListedReader* reader) {
    MARLIN_ASSIGN_OR_RETURN(
        m_.codes, finder_.Need(ModulePart::kCodes, ".qweight", {DType::kI32, DType::kI16}));
    MARLIN_ASSIGN_OR_RETURN(
        m_.scales, finder_.Need(ModulePart::kScales, ".scales", {DType::kF16, DType::kBf16}));
    const bool fast = finder_.TypeOf(m_.codes) == DType::kI16;
    const DType zero_type = fast ? finder_.TypeOf(m_.scales) : DType::kI32;
    MARLIN_ASSIGN_OR_RETURN(m_.zeros, finder_.Need(fast ? ModulePart::kBiases : ModulePart::kZeros,
                                                   ".qzeros", {zero_type}));
    const Shape& codes = finder_.ShapeOf(m_.codes);
    const Shape& scales = finder_.ShapeOf(m_.scales);
    const Shape& zeros = finder_.ShapeOf(m_.zeros);
    if (codes.rank() != 2 || scales.rank() != 2 || zeros.rank() != 2 || codes[0] < 1 ||
        codes[1] < 1 || scales[0] < 1) {
      return Misfit();
    }
    // Equal row counts in gemm would mean one group per k, which no writer has.
    const bool gemv = !fast && scales[0] == codes[0];
    MARLIN_RETURN_IF_ERROR(fast ? FindFast() : (gemv ? FindGemv() : FindGemm()));
    WeightsSpec spec{.format = Format::kU4,
                     .k = m_.k,
                     .n = m_.n,
                     .group_size = std::min(GroupSize(), m_.k),
                     .scale_type = *ScaleTypeOf(finder_.TypeOf(m_.scales)),
                     .has_zeros = !fast,
                     .has_biases = fast};
    const auto fill = fast ? &FillGemvFast : (gemv ? &FillGemv : &FillGemm);
    const TensorStore& store = finder_.store();
    reader->Add(RecordOf(finder_.base() + ".weight", spec), finder_.TakeParts(),
                [m = m_, fill, &store](WeightsBuffer* buffer, ThreadPool& pool) {
                  return fill(store, m, buffer, pool);
                });
    return {};
  }

 private:
  int64_t GroupSize() const { return group_size_ > 0 ? group_size_ : m_.k; }

  Status Misfit() const {
    return finder_.Malformed(
        ".qweight",
        fmt::format("{} does not fit scales {} and zeros {} (group_size={})",
                    finder_.ShapeOf(m_.codes).ToString(), finder_.ShapeOf(m_.scales).ToString(),
                    finder_.ShapeOf(m_.zeros).ToString(), group_size_));
  }

  Status FindGemm() {
    const Shape& codes = finder_.ShapeOf(m_.codes);
    const Shape& scales = finder_.ShapeOf(m_.scales);
    m_.k = codes[0];
    m_.n = scales[1];
    m_.groups = scales[0];
    const bool fits = m_.n % kNibblesPerWord == 0 && codes[1] == m_.n / kNibblesPerWord &&
                      finder_.ShapeOf(m_.zeros) == Shape{m_.groups, codes[1]} &&
                      CeilDivide(m_.k, GroupSize()) == m_.groups;
    return fits ? Status() : Misfit();
  }

  Status FindGemv() {
    const Shape& codes = finder_.ShapeOf(m_.codes);
    const std::optional<int64_t> k = (Checked(codes[1]) * Checked(kNibblesPerWord)).Take();
    if (!k) return Misfit();
    m_.k = *k;
    m_.n = codes[0];
    return FindPadded({m_.n, ZerosWidth(m_.k, GroupSize()) * kNibblesPerWord},
                      {m_.n, ZerosWidth(m_.k, GroupSize())});
  }

  Status FindFast() {
    const Shape& codes = finder_.ShapeOf(m_.codes);
    m_.k = codes[1];
    const std::optional<int64_t> n = (Checked(codes[0]) * Checked(4)).Take();
    if (!n || m_.k % 64 != 0) return Misfit();
    m_.n = *n;
    const Shape shape{ZerosWidth(m_.k, GroupSize()) * kNibblesPerWord, m_.n};
    return FindPadded(shape, shape);
  }

  Status FindPadded(const Shape& scales, const Shape& zeros) {
    m_.groups = m_.k / GroupSize();
    m_.padded_groups = ZerosWidth(m_.k, GroupSize()) * kNibblesPerWord;
    const bool fits = m_.k % GroupSize() == 0 && finder_.ShapeOf(m_.scales) == scales &&
                      finder_.ShapeOf(m_.zeros) == zeros;
    return fits ? Status() : Misfit();
  }

  ModuleTensorFinder finder_;
  int64_t group_size_ = -1;
  AwqModule m_;
};

}  // namespace

OpenReader OpenAwq;

Result<std::unique_ptr<const ModuleReader>> OpenAwq(TensorStore& store, const QuantMethod& method) {
  ModelConfig json = ModelConfig::Of(*method.config, method.where);
  const int64_t bits = json.SizeOr("w_bit", 8, json.SizeOr("bits", 8, 4));
  const int64_t group_size = json.IntegerOr("q_group_size", -1, INT32_MAX,
                                            json.IntegerOr("group_size", -1, INT32_MAX, 128));
  MARLIN_RETURN_IF_ERROR(json.status());
  if (bits != 4) {
    return Status(
        Code::kUnsupported,
        fmt::format("{}: AWQ of {} bits is not supported; supported: 4", method.where, bits));
  }
  return ListedReader::Open(store, [&](ListedReader* reader) -> Status {
    for (const std::string& base : BasesWithSuffix(store, ".qweight")) {
      MARLIN_RETURN_IF_ERROR(AwqFinder(store, group_size, base).AddTo(reader));
    }
    return {};
  });
}

}  // namespace marlin
