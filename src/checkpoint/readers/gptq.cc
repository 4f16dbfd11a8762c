// GPTQ, as AutoGPTQ and GPTQModel write it. X.weight is stored as X.qweight i32 [k * bits / 32, n],
// which is the canonical layout, X.scales [groups, n], X.qzeros i32 [groups, n * bits / 32] packed
// along n, and X.g_idx i32 [k], the group of each k. Codes of 5, 6 and 7 bits and their zeros, and
// 3 bits in the format gptq_p, lie in planes (bit_planes.h).
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/scalars.h"
#include "checkpoint/codes/bit_planes.h"
#include "checkpoint/codes/unpack.h"
#include "checkpoint/listed_reader.h"
#include "layout/parameters.h"
#include "layout/permutation.h"
#include "recipe/model_config.h"

namespace marlin {
namespace {

constexpr int64_t kRun = 32;  // Codes that fill whole words, whatever their bits.

struct GptqConfig {
  int64_t bits = 4;
  int64_t group_size = -1;  // -1: one group.
  bool overrides = false;   // Modules may have other bits and group sizes.
  bool version_1 = true;    // Zeros are stored less one.
  bool planar = false;      // Codes of 3 bits lie in planes, too.
};

struct GptqModule {
  int bits = 4;
  int64_t k = 0;
  int64_t n = 0;
  int64_t groups = 0;
  int64_t group_size = 0;
  bool version_1 = true;
  bool planar = false;
  size_t codes = 0;
  size_t scales = 0;
  size_t zeros = 0;
  std::optional<size_t> group_index;  // Nothing: groups are consecutive.
  std::vector<int32_t> permutation;   // Sorts k by group_index; empty: nothing does.
};

Result<GptqConfig> ReadGptqConfig(const QuantMethod& method) {
  ModelConfig json = ModelConfig::Of(*method.config, method.where);
  GptqConfig config;
  config.bits = json.SizeOr("bits", 8, 4);
  config.group_size = json.IntegerOr("group_size", -1, INT32_MAX, -1);
  config.overrides = json.Has("dynamic") || json.Has("modules_in_block_to_quantize");
  const std::string fallback = json.StringOr("format", "gptq");
  const std::string format = json.StringOr("checkpoint_format", fallback);
  MARLIN_RETURN_IF_ERROR(json.status());
  if (format != "gptq" && format != "gptq_v2" && format != "gptq_p") {
    return Status(
        Code::kUnsupported,
        fmt::format("{}: format \"{}\" is not supported; supported: gptq, gptq_v2, gptq_p",
                    method.where, Printable(format)));
  }
  config.version_1 = format == "gptq";
  config.planar = format == "gptq_p";
  return config;
}

// Version 1 stores zeros less one. Its writers subtract 1 from every field by a subtraction of
// whole words, with borrows between the fields, which the addition of whole words undoes; 3-bit
// fields cross words and were changed one by one.
std::vector<uint8_t> UnpackZeros(const TensorStore& store, const GptqModule& m) {
  const int64_t words = m.n * m.bits / 32;
  const uint32_t one = m.bits == 2 ? 0x55555555u : (m.bits == 4 ? 0x11111111u : 0x01010101u);
  std::vector<uint8_t> zeros(static_cast<size_t>(m.groups * m.n));
  std::vector<uint32_t> row(static_cast<size_t>(words));
  for (int64_t g = 0; g < m.groups; ++g) {
    std::memcpy(row.data(), store.Data(m.zeros) + g * words * 4, row.size() * 4);
    uint8_t* out = zeros.data() + g * m.n;
    if (m.planar) {
      for (int64_t c = 0; c < m.n; ++c) {
        const auto* run = reinterpret_cast<const std::byte*>(row.data() + c / kRun * m.bits);
        out[c] = static_cast<uint8_t>(PlanarCode(run, 1, m.bits, c % kRun));
      }
      continue;
    }
    if (m.version_1 && m.bits != 3) {
      for (uint32_t& word : row) word += one;
    }
    UnpackDense(reinterpret_cast<const std::byte*>(row.data()), m.bits, m.n, out);
    if (!m.version_1 || m.bits != 3) continue;
    for (int64_t c = 0; c < m.n; ++c) out[c] = static_cast<uint8_t>((out[c] + 1u) & 7u);
  }
  return zeros;
}

/// The group of a k in a stored index. A negative one counts from the last group, as in the
/// programs that index with it.
int64_t GroupAt(const std::byte* index, int64_t k, int64_t groups) {
  const auto group = static_cast<int32_t>(WordAt(index, k));
  return group < 0 ? group + groups : group;
}

// Finds the order of k in a file that was made with act-order: the groups of its g_idx are not
// consecutive.
Status FindOrder(const ModuleTensorFinder& finder, size_t tensor, GptqModule* module) {
  GptqModule& m = *module;
  bool consecutive = true;
  bool given = false;
  std::vector<int32_t> groups(static_cast<size_t>(m.k));
  for (int64_t k = 0; k < m.k; ++k) {
    const auto stored = static_cast<int32_t>(WordAt(finder.Data(tensor), k));
    const int64_t group = GroupAt(finder.Data(tensor), k, m.groups);
    given = given || stored != -1;
    if (group < 0 || group >= m.groups) {
      return finder.Malformed(".g_idx", fmt::format("group {} of {} at [{}]", stored, m.groups, k));
    }
    consecutive = consecutive && group == k / m.group_size;
    groups[static_cast<size_t>(k)] = static_cast<int32_t>(group);
  }
  // An index of nothing but -1 was never filled in.
  if (consecutive || !given) return {};
  m.group_index = tensor;
  m.permutation = SortByGroup(groups, m.group_size);
  return {};
}

class GptqFinder {
 public:
  GptqFinder(const TensorStore& store, const GptqConfig& config, const std::string& base)
      : finder_(store, base), config_(config) {}

  Status AddTo(ListedReader* reader) {
    MARLIN_RETURN_IF_ERROR(FindShapes());
    m_.planar = m_.bits >= 5 && m_.bits <= 7;
    m_.planar = m_.planar || (m_.bits == 3 && config_.planar);
    m_.version_1 = config_.version_1 && !m_.planar;
    MARLIN_ASSIGN_OR_RETURN(m_.group_size, GroupSize());
    if (finder_.Has(".g_idx")) {
      MARLIN_ASSIGN_OR_RETURN(const size_t index,
                              finder_.Need(ModulePart::kCodes, ".g_idx", {DType::kI32}, {m_.k}));
      MARLIN_RETURN_IF_ERROR(FindOrder(finder_, index, &m_));
    }
    const std::vector<uint8_t> zeros = UnpackZeros(finder_.store(), m_);
    const bool symmetric = std::all_of(zeros.begin(), zeros.end(),
                                       [&](uint8_t zero) { return zero == 1u << (m_.bits - 1); });
    WeightsSpec spec{.format = Format::kFp32, .k = m_.k, .n = m_.n, .group_size = m_.k};
    // Groups of unequal sizes have no format of their own.
    if (!m_.group_index || !m_.permutation.empty()) {
      spec.format = IntegerFormat(m_.bits, !symmetric);
      spec.group_size = m_.group_size;
      spec.scale_type = *ScaleTypeOf(finder_.TypeOf(m_.scales));
      spec.has_zeros = !symmetric;
      spec.has_permutation = m_.group_index.has_value();
    }
    const TensorStore& store = finder_.store();
    ListedReader::Fill fill = [m = m_, &store](WeightsBuffer* buffer, ThreadPool& pool) {
      const bool codes = GetFormatInfo(buffer->weights.spec.format).quantized;
      return codes ? FillCodes(store, m, buffer, pool) : FillFloats(store, m, buffer, pool);
    };
    reader->Add(RecordOf(finder_.base() + ".weight", spec), finder_.TakeParts(), std::move(fill));
    return {};
  }

 private:
  // The number of bits follows from the shapes; the configuration must agree.
  Status FindShapes() {
    MARLIN_ASSIGN_OR_RETURN(m_.codes, finder_.Need(ModulePart::kCodes, ".qweight", {DType::kI32}));
    MARLIN_ASSIGN_OR_RETURN(m_.scales, finder_.Need(ModulePart::kScales, ".scales", kFloatTypes));
    MARLIN_ASSIGN_OR_RETURN(m_.zeros, finder_.Need(ModulePart::kZeros, ".qzeros", {DType::kI32}));
    const Shape& codes = finder_.ShapeOf(m_.codes);
    const Shape& scales = finder_.ShapeOf(m_.scales);
    const Shape& packed = finder_.ShapeOf(m_.zeros);
    if (codes.rank() != 2 || scales.rank() != 2 || codes[1] != scales[1] || codes[1] < 1 ||
        codes[0] < 1 || scales[0] < 1) {
      return finder_.Malformed(".qweight", fmt::format("{} does not fit scales {}",
                                                       codes.ToString(), scales.ToString()));
    }
    m_.n = codes[1];
    m_.groups = scales[0];
    if (packed.rank() != 2 || packed[0] != m_.groups || packed[1] * 32 % m_.n != 0) {
      return finder_.Malformed(".qzeros", fmt::format("{} does not fit scales {}",
                                                      packed.ToString(), scales.ToString()));
    }
    const int64_t bits = packed[1] * 32 / m_.n;
    if (bits < 2 || bits > 8) {
      return finder_.Unsupported(fmt::format("{} bits are not supported; supported: 2 to 8", bits));
    }
    if (bits != config_.bits && !config_.overrides) {
      return finder_.Malformed(".qzeros", fmt::format("{} has {} bits, the configuration {}",
                                                      packed.ToString(), bits, config_.bits));
    }
    m_.bits = static_cast<int>(bits);
    const bool runs = 32 % bits != 0;  // Only 32 codes fill whole words.
    if (runs && m_.n % kRun != 0) {
      return finder_.Malformed(
          ".qzeros", fmt::format("{} columns do not fill words of {}-bit zeros", m_.n, bits));
    }
    if (runs && codes[0] % bits != 0) {
      return finder_.Malformed(
          ".qweight", fmt::format("{} rows do not hold whole {}-bit codes", codes[0], bits));
    }
    m_.k = codes[0] * 32 / bits;
    return {};
  }

  Result<int64_t> GroupSize() const {
    const int64_t listed = config_.group_size > 0 ? config_.group_size : m_.k;
    if (CeilDivide(m_.k, listed) == m_.groups) return std::min(listed, m_.k);
    if (config_.overrides && m_.k % m_.groups == 0) return m_.k / m_.groups;
    return finder_.Malformed(".scales",
                             fmt::format("{} groups, expected {} (k={}, group_size={})", m_.groups,
                                         CeilDivide(m_.k, listed), m_.k, config_.group_size));
  }

  static void FillPlanes(const TensorStore& store, const GptqModule& m, WeightsBuffer* buffer,
                         ThreadPool& pool) {
    const std::byte* words = store.Data(m.codes);
    // Codes of 7 bits are held in 8: s8 codes are the values.
    const int offset = buffer->weights.spec.format == Format::kS8 ? 1 << (m.bits - 1) : 0;
    const auto unpack = [&](int64_t c, uint8_t* codes) {
      for (int64_t k = 0; k < m.k; ++k) {
        const std::byte* run = words + (k / kRun * m.bits * m.n + c) * 4;
        codes[k] = static_cast<uint8_t>(PlanarCode(run, m.n, m.bits, k % kRun) - offset);
      }
    };
    PackByteRows(unpack, *buffer, pool);
  }

  static Status FillCodes(const TensorStore& store, const GptqModule& m, WeightsBuffer* buffer,
                          ThreadPool& pool) {
    const TensorView& codes = buffer->weights.codes;
    if (m.planar) {
      FillPlanes(store, m, buffer, pool);
    } else {
      std::memcpy(buffer->codes, store.Data(m.codes), static_cast<size_t>(codes.ByteCount()));
      if (buffer->weights.spec.format == Format::kS8) {
        auto* words = static_cast<uint32_t*>(buffer->codes);
        for (int64_t i = 0; i < codes.ElementCount(); ++i) words[i] ^= 0x80808080u;
      }
    }
    std::memcpy(buffer->scales, store.Data(m.scales),
                static_cast<size_t>(buffer->weights.scales.ByteCount()));
    if (!m.permutation.empty()) MARLIN_RETURN_IF_ERROR(StoreSorted(m.permutation, buffer));
    if (buffer->zeros == nullptr) return {};
    // Values of int2 and int3 are centered, of u4 to u8 not.
    const int middle = m.bits >= 4 ? 0 : 1 << (m.bits - 1);
    const std::vector<uint8_t> zeros = UnpackZeros(store, m);
    StoreZeros(
        [&](int64_t c, int64_t g) { return zeros[static_cast<size_t>(g * m.n + c)] - middle; },
        *buffer);
    return {};
  }

  static Status FillFloats(const TensorStore& store, const GptqModule& m, WeightsBuffer* buffer,
                           ThreadPool& pool) {
    const std::vector<uint8_t> zeros = UnpackZeros(store, m);
    auto* out = static_cast<float*>(buffer->codes);
    pool.Run(CeilDivide(m.k, kRun), [&](int64_t run, int) {
      for (int64_t k = kRun * run; k < std::min(m.k, kRun * (run + 1)); ++k) {
        const int64_t group =
            m.group_index ? GroupAt(store.Data(*m.group_index), k, m.groups) : k / m.group_size;
        if (group < 0 || group >= m.groups)
          return;  // Checked at opening: the file has changed since.
        FillRow(store, m, k, group, zeros.data() + group * m.n, out + k * m.n);
      }
    });
    return {};
  }

  // The values of row k of W, all in one group.
  static void FillRow(const TensorStore& store, const GptqModule& m, int64_t k, int64_t group,
                      const uint8_t* zeros, float* out) {
    const std::byte* scales = store.Data(m.scales);
    const DType scale_type = store.tensors[m.scales].dtype;
    // A run of 32 codes fills as many words as codes have bits.
    const std::byte* words = store.Data(m.codes) + k / kRun * m.bits * m.n * 4;
    const int64_t bit = k % kRun * m.bits;
    const auto code_at = [&](int64_t c) {
      if (m.planar) return PlanarCode(words + c * 4, m.n, m.bits, k % kRun);
      uint64_t window = WordAt(words, bit / 32 * m.n + c);
      if (bit % 32 + m.bits > 32) {
        window |= uint64_t{WordAt(words, (bit / 32 + 1) * m.n + c)} << 32;
      }
      return static_cast<int>((window >> (bit % 32)) & ((1u << m.bits) - 1));
    };
    for (int64_t c = 0; c < m.n; ++c) {
      const int code = code_at(c);
      out[c] =
          ParameterAt(scales, scale_type, group * m.n + c) * static_cast<float>(code - zeros[c]);
    }
  }

  ModuleTensorFinder finder_;
  const GptqConfig& config_;
  GptqModule m_;
};

}  // namespace

OpenReader OpenGptq;

Result<std::unique_ptr<const ModuleReader>> OpenGptq(TensorStore& store,
                                                     const QuantMethod& method) {
  MARLIN_ASSIGN_OR_RETURN(const GptqConfig config, ReadGptqConfig(method));
  return ListedReader::Open(store, [&](ListedReader* reader) -> Status {
    for (const std::string& base : BasesWithSuffix(store, ".qweight")) {
      MARLIN_RETURN_IF_ERROR(GptqFinder(store, config, base).AddTo(reader));
    }
    return {};
  });
}

}  // namespace marlin
