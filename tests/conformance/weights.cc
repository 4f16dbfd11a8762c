// Random quantized weights in the canonical layout, packed by independent bit arithmetic.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

#include "base/scalars.h"
#include "guarded_buffer.h"
#include "problem.h"
#include "random.h"
#include "store_element.h"

namespace marlin::conformance {
namespace {

struct WeightMemory {
  GuardedBuffer codes;
  GuardedBuffer metadata;
  GuardedBuffer scales;
  GuardedBuffer zeros;
  GuardedBuffer biases;
  GuardedBuffer global_scale;
  std::shared_ptr<const void> narrow;
};

// A float format whose full code range would need more than 24 bits gets a window of exponents per
// column, so that all codes appear and every column still sums exactly.
uint32_t WindowedFp8(Random& random, int exponent_bits, int64_t column) {
  const int mantissa_bits = 7 - exponent_bits;
  const int64_t last = (1 << exponent_bits) - (exponent_bits == 5 ? 2 : 1);
  const int64_t width = 3;
  const int64_t first = (column * 5) % (last - width + 2);
  const auto exponent = static_cast<uint32_t>(first + random.Integer(0, width - 1));
  const auto mantissa = static_cast<uint32_t>(random.Integer(0, (1 << mantissa_bits) - 1));
  return static_cast<uint32_t>(random.Integer(0, 1) << 7) | (exponent << mantissa_bits) | mantissa;
}

// Whether a value may occur: every number, in the small lattice those of up to 16 and, of fp8,
// those in [1, 2), whose products and sums need few bits.
bool MayOccur(const Case& c, float value) {
  if (c.data != DataClass::kLatticeSmall) return std::isfinite(value);
  const float magnitude = std::fabs(value);
  const bool fp8 = c.format == Format::kFp8E4M3 || c.format == Format::kFp8E5M2;
  return fp8 ? magnitude >= 1 && magnitude < 2 : magnitude <= 16;
}

uint32_t ExtremeCode(Random& random, Format format, int64_t k, int64_t n) {
  const std::span<const float> values = FormatValues(format);
  const FormatInfo& info = GetFormatInfo(format);
  const int64_t pattern = n % 4;
  const bool high =
      pattern == 0 || (pattern == 2 && k % 2 == 0) || (pattern == 3 && random.OneIn(2));
  const float wanted = high ? info.max_value : info.min_value;
  for (size_t code = 0; code < values.size(); ++code) {
    if (values[code] == wanted) return static_cast<uint32_t>(code);
  }
  return 0;
}

uint32_t RandomCode(Random& random, const Case& c, int64_t k, int64_t n) {
  if (c.data == DataClass::kExtremes) return ExtremeCode(random, c.format, k, n);
  const FormatInfo& info = GetFormatInfo(c.format);
  const bool windowed = IsLattice(c.data) && c.data != DataClass::kLatticeSmall;
  for (;;) {
    uint32_t code = static_cast<uint32_t>(random.Integer(0, (int64_t{1} << info.bits) - 1));
    if (windowed && c.format == Format::kFp8E4M3) code = WindowedFp8(random, 4, n);
    if (windowed && c.format == Format::kFp8E5M2) code = WindowedFp8(random, 5, n);
    if (MayOccur(c, FormatValues(c.format)[code])) return code;
  }
}

// Fills `word_count` words per column with `count` codes.
void FillCodes(Random& random, const Case& c, int64_t count, int64_t word_count, uint32_t* words) {
  const int bits = GetFormatInfo(c.format).bits;
  std::memset(words, 0, static_cast<size_t>(c.experts * word_count * c.n) * 4);
  for (int64_t e = 0; e < c.experts; ++e) {
    uint32_t* matrix = words + e * word_count * c.n;
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t n = 0; n < c.n; ++n) {
        const uint64_t code = RandomCode(random, c, k, n);
        const int64_t bit = k % 32 * bits;
        const int64_t word = k / 32 * bits + bit / 32;
        const uint64_t shifted = code << (bit % 32);
        matrix[word * c.n + n] |= static_cast<uint32_t>(shifted);
        if (shifted >> 32 != 0)
          matrix[(word + 1) * c.n + n] |= static_cast<uint32_t>(shifted >> 32);
      }
    }
  }
}

// The patterns of 2:4 weights, each as often as the others. Blocks past k get one as well.
void FillMetadata(Random& random, int64_t count, uint32_t* words) {
  constexpr uint32_t kNibbles[] = {4, 8, 9, 12, 13, 14};
  for (int64_t i = 0; i < count; ++i) {
    words[i] = 0;
    for (int block = 0; block < 8; ++block) {
      words[i] |= kNibbles[random.Integer(0, 5)] << (4 * block);
    }
  }
}

void FillUnquantized(Random& random, const Case& c, DType dtype, std::byte* data) {
  for (int64_t i = 0; i < c.experts * c.k * c.n; ++i) {
    double value = random.Gaussian() * 0.05;
    if (IsLattice(c.data)) {
      const int64_t most = c.data == DataClass::kLatticeSmall ? 7 : 15;
      value =
          std::ldexp(static_cast<double>(random.Integer(-most, most)), -static_cast<int>(i % 3));
    }
    if (c.data == DataClass::kExtremes) value = (i % 3 == 0 ? -1.0 : 1.0) * 60000.0;
    if (c.data == DataClass::kSubnormal) {
      value = std::ldexp(random.Gaussian(), dtype == DType::kF16 ? -18 : -130);
    }
    if (c.data == DataClass::kHeavy) value *= std::ldexp(1.0, static_cast<int>(i % 13) - 6);
    StoreElement(data, dtype, i, value);
  }
}

// Neighbours along n and along the groups differ, so that a wrong index is detected.
double LatticeScale(const Case& c, int64_t group, int64_t n) {
  const int exponent = c.data == DataClass::kLatticeSmall
                           ? static_cast<int>((n + 2 * group) % 3) - 1
                           : static_cast<int>((n + 2 * group) % 5) - 2;
  const double scale = std::ldexp(1.0, exponent);
  const bool negative = c.scale_type != ScaleType::kE8M0 && (n + group) % 7 == 3;
  return negative ? -scale : scale;
}

double SubnormalScale(Random& random, ScaleType type) {
  const auto steps = static_cast<double>(random.Integer(1, 100));
  switch (type) {
    case ScaleType::kF16:
      return steps * 0x1p-24;
    case ScaleType::kBf16:
      return steps * 0x1p-133;
    case ScaleType::kF32:
      return steps * 0x1p-140;
    case ScaleType::kE8M0:
      return std::ldexp(1.0, static_cast<int>(random.Integer(0, 3)) - 127);
    case ScaleType::kE4M3:
      return static_cast<double>(random.Integer(1, 7)) * 0x1p-9;
  }
  return 0;
}

double RandomScale(Random& random, const Case& c, int64_t group, int64_t n) {
  if (IsLattice(c.data)) return LatticeScale(c, group, n);
  if (c.data == DataClass::kSubnormal) return SubnormalScale(random, c.scale_type);
  const double spread = c.data == DataClass::kHeavy ? 4.0 : 0.7;
  double exponent = std::clamp(spread * random.Gaussian(), -5.0, 5.0);
  if (c.data == DataClass::kExtremes) exponent = 2.0;
  if (c.scale_type == ScaleType::kE8M0) return std::exp2(std::round(exponent));
  const double scale = std::exp2(exponent);
  return random.OneIn(8) ? -scale : scale;
}

double RandomZero(Random& random, const Case& c, int64_t group, int64_t n) {
  const FormatInfo& info = GetFormatInfo(c.format);
  const auto span = static_cast<int64_t>(info.max_value - info.min_value);
  const double low = info.min_value;
  if (IsLattice(c.data)) {
    // Near the middle of 8-bit codes, so that bf16 holds the differences.
    const bool wide = info.bits == 8;
    const double first = wide ? low + static_cast<double>(span / 2 - 2) : low;
    const double whole = first + static_cast<double>((3 * n + 5 * group) % (wide ? 7 : span + 1));
    return c.zero == ZeroKind::kInteger ? whole
                                        : whole + 0.25 * static_cast<double>((n + group) % 4);
  }
  if (c.zero == ZeroKind::kInteger) return low + static_cast<double>(random.Integer(0, span));
  return low + random.Uniform() * static_cast<double>(span);
}

void FillGroups(Random& random, const Case& c, WeightMemory& memory) {
  const int64_t groups = c.k == 0 ? 0 : (c.k + c.group_size - 1) / c.group_size;
  const DType bias_type = BiasDType(c.scale_type);
  int64_t at = 0;
  for (int64_t e = 0; e < c.experts; ++e) {
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t n = 0; n < c.n; ++n, ++at) {
        const double scale = RandomScale(random, c, g, n + e);
        StoreScale(memory.scales.data(), c.scale_type, at, scale);
        if (c.zero != ZeroKind::kNone) {
          StoreElement(memory.zeros.data(), ScaleDType(c.zero_type), at,
                       RandomZero(random, c, g, n + e));
        }
        if (c.weight_biases) {
          const double factor = IsLattice(c.data) ? static_cast<double>((n + 3 * g + e) % 7 - 3)
                                                  : 3.0 * random.Gaussian();
          StoreElement(memory.biases.data(), bias_type, at, scale * factor);
        }
      }
    }
  }
}

// An ascending integer table, small enough that every GEMM stays exact.
std::vector<float> LatticeCodebook(int bits) {
  std::vector<float> table;
  const int count = 1 << bits;
  for (int i = 0; i < count; ++i) {
    const int step = i - count / 2;
    table.push_back(static_cast<float>(step + (step > 2 ? step : 0)));
  }
  return table;
}

}  // namespace

GuardedBuffer RepeatRows(const TensorView& view, int64_t n, int parts, int64_t offset) {
  const int64_t rows = view.dim(1);
  const int64_t bytes = DTypeBytes(view.dtype());
  const int64_t period = view.dim(2) / parts * bytes;
  const int64_t part = n / parts * bytes;
  GuardedBuffer memory(rows * n * bytes, offset);
  const auto* from = static_cast<const std::byte*>(view.data());
  std::byte* to = memory.data();
  for (int64_t i = 0; i < rows * parts; ++i, from += period, to += part) {
    for (int64_t at = 0; at < part; at += period) {
      std::memcpy(to + at, from, static_cast<size_t>(std::min(period, part - at)));
    }
  }
  return memory;
}

QuantizedWeights RepeatColumns(const QuantizedWeights& weights, int64_t n, int parts) {
  auto memory = std::make_shared<WeightMemory>();
  QuantizedWeights wide = weights;
  const auto repeat = [&](const TensorView& view, GuardedBuffer& repeated) {
    if (view.empty()) return TensorView();
    repeated = RepeatRows(view, n, parts);
    return TensorView(repeated.data(), view.dtype(), {1, view.dim(1), n});
  };
  wide.spec.n = n;
  wide.codes = repeat(weights.codes, memory->codes);
  wide.metadata = repeat(weights.metadata, memory->metadata);
  wide.scales = repeat(weights.scales, memory->scales);
  wide.zeros = repeat(weights.zeros, memory->zeros);
  wide.biases = repeat(weights.biases, memory->biases);
  // The global scale has no columns and is shared with the narrow weights, which must stay alive.
  memory->narrow = weights.owner;
  wide.owner = memory;
  return wide;
}

QuantizedWeights MakeWeights(const Case& c) {
  Random random(HashText("weights") ^ (c.seed * 0x9e3779b9u) ^
                (static_cast<uint64_t>(c.format) << 32));
  const FormatInfo& info = GetFormatInfo(c.format);
  auto memory = std::make_shared<WeightMemory>();
  QuantizedWeights weights;
  weights.spec = {.format = c.format,
                  .experts = c.experts,
                  .k = c.k,
                  .n = c.n,
                  .group_size = c.group_size,
                  .scale_type = c.scale_type,
                  .has_zeros = c.zero != ZeroKind::kNone,
                  .zero_type = c.zero_type,
                  .has_biases = c.weight_biases,
                  .has_global_scale = c.scale_type == ScaleType::kE4M3,
                  .global_scale_divides = c.global_divides,
                  .sparsity = c.sparse ? Sparsity::k24 : Sparsity::kDense};
  weights.owner = memory;
  if (!info.quantized) {
    const DType dtype = UnquantizedDType(c.format);
    memory->codes = GuardedBuffer(c.experts * c.k * c.n * DTypeBytes(dtype));
    FillUnquantized(random, c, dtype, memory->codes.data());
    weights.codes = TensorView(memory->codes.data(), dtype, {c.experts, c.k, c.n});
    return weights;
  }

  const int64_t words = WordsAlongK(weights.spec);
  const int64_t groups = GroupCount(weights.spec);
  const int64_t count = c.experts * groups * c.n;
  const DType scale_dtype = ScaleDType(c.scale_type);
  const DType bias_dtype = BiasDType(c.scale_type);
  memory->codes = GuardedBuffer(c.experts * words * c.n * 4);
  memory->scales = GuardedBuffer(count * DTypeBytes(scale_dtype));
  memory->zeros = GuardedBuffer(count * DTypeBytes(ScaleDType(c.zero_type)));
  memory->biases = GuardedBuffer(count * DTypeBytes(bias_dtype));
  memory->global_scale = GuardedBuffer(c.experts * 4);
  FillCodes(random, c, c.sparse ? (c.k + 3) / 4 * 2 : c.k, words,
            reinterpret_cast<uint32_t*>(memory->codes.data()));
  if (c.sparse) {
    const int64_t metadata_words = MetadataWordsAlongK(c.k);
    const int64_t metadata_count = c.experts * metadata_words * c.n;
    memory->metadata = GuardedBuffer(metadata_count * 4);
    FillMetadata(random, metadata_count, reinterpret_cast<uint32_t*>(memory->metadata.data()));
    weights.metadata =
        TensorView(memory->metadata.data(), DType::kU32, {c.experts, metadata_words, c.n});
  }
  FillGroups(random, c, *memory);
  weights.codes = TensorView(memory->codes.data(), DType::kU32, {c.experts, words, c.n});
  weights.scales = TensorView(memory->scales.data(), scale_dtype, {c.experts, groups, c.n});
  if (weights.spec.has_zeros) {
    weights.zeros =
        TensorView(memory->zeros.data(), ScaleDType(c.zero_type), {c.experts, groups, c.n});
  }
  if (weights.spec.has_biases) {
    weights.biases = TensorView(memory->biases.data(), bias_dtype, {c.experts, groups, c.n});
  }
  if (weights.spec.has_global_scale) {
    for (int64_t e = 0; e < c.experts; ++e) {
      const double global = IsLattice(c.data) ? std::ldexp(0.25, static_cast<int>(e) + 1)
                                              : 0.01 * (1.0 + random.Uniform());
      StoreElement(memory->global_scale.data(), DType::kF32, e,
                   c.global_divides ? 1 / global : global);
    }
    weights.global_scale = TensorView(memory->global_scale.data(), DType::kF32, {c.experts});
  }
  if (c.user_codebook) {
    weights.codebook = LatticeCodebook(info.bits);
    if (!IsLattice(c.data)) {
      for (float& value : weights.codebook) value = value * 0.371f + 0.013f;
    }
  }
  return weights;
}

}  // namespace marlin::conformance
