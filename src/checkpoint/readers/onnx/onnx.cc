// ONNX models: initializers, in the file or beside it, and the nodes that say how those are
// quantized. MatMulNBits holds codes by output feature with scales, and zeros of its own packing;
// DequantizeLinear has one scale, one for each index of an axis, or one for each block along it.
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/scalars.h"
#include "checkpoint/codes/row_weights.h"
#include "checkpoint/codes/unpack.h"
#include "checkpoint/convert/quantize_plan.h"
#include "checkpoint/files/model_directory.h"
#include "checkpoint/files/safetensors.h"
#include "checkpoint/listed_reader.h"
#include "checkpoint/readers/onnx/onnx_experts.h"
#include "checkpoint/readers/onnx/onnx_uses.h"
#include "layout/input_transform.h"
#include "layout/parameters.h"
#include "layout/permutation.h"

namespace marlin {
namespace {

using Source = OnnxSource;

/// Nodes whose weights are quantized in a way that is not read.
bool IsForeignOp(const OnnxNode& node) {
  constexpr std::string_view kOps[] = {"MatMulBnb4",
                                       "GatherBlockQuantized",
                                       "MatMulBlockQuantizedFp4Weight",
                                       "MatMulBlockQuantizedFp8Weight",
                                       "MatMulInteger",
                                       "MatMulIntegerToFloat",
                                       "DynamicQuantizeMatMul",
                                       "ConvInteger"};
  return node.op.starts_with("QLinear") ||
         std::find(std::begin(kOps), std::end(kOps), node.op) != std::end(kOps);
}

/// How the codes of an integer type are held: value = code - offset.
struct Held {
  Format format = Format::kU8;
  int offset = 0;    ///< That of int2 is -2, its lowest value.
  uint8_t flip = 0;  ///< Two's complement of the source to our codes.
};

/// A matrix as its DequantizeLinear node describes it.
struct Dequantized {
  const Source* codes = nullptr;
  const Source* scales = nullptr;
  const Source* zeros = nullptr;  ///< Null: none.
  bool out_in = false;            ///< The matrix is [out, in].
  int64_t k = 0;
  int64_t n = 0;
  int64_t axis = 1;
  int64_t block = 0;  ///< 0: one scale for the matrix, or one for each index of the axis.

  int64_t Index(int64_t k_at, int64_t n_at) const {
    return out_in ? n_at * k + k_at : k_at * n + n_at;
  }
  /// The number of the scale of a weight.
  int64_t ScaleIndex(int64_t k_at, int64_t n_at) const {
    const int64_t row = out_in ? n_at : k_at;
    const int64_t column = out_in ? k_at : n_at;
    const int64_t columns = out_in ? k : n;
    if (block == 0) return scales->count() == 1 ? 0 : (axis == 0 ? row : column);
    return axis == 0 ? row / block * columns + column
                     : row * CeilDivide(columns, block) + column / block;
  }
  bool AlongK() const { return axis == (out_in ? 1 : 0); }
};

}  // namespace

OpenReader OpenPlain;

namespace {

class OnnxReader {
 public:
  explicit OnnxReader(TensorStore& store)
      : store_(store), reader_(std::make_unique<ListedReader>(store)) {}

  Result<std::unique_ptr<const ModuleReader>> Open() {
    MARLIN_ASSIGN_OR_RETURN(file_, ParseOnnx(store_.files.front().mapping->text(), Where()));
    sources_ = std::make_shared<std::vector<Source>>();
    sources_->reserve(file_.tensors.size());
    for (const OnnxTensor& tensor : file_.tensors) MARLIN_RETURN_IF_ERROR(AddSource(tensor));
    uses_ = OnnxUses(file_.nodes);
    for (const OnnxNode& node : file_.nodes) MARLIN_RETURN_IF_ERROR(ReadNode(node));
    MARLIN_RETURN_IF_ERROR(Store());
    if (modules_.empty()) return OpenPlain(store_, QuantMethod());
    for (const auto& add : modules_) add();
    MARLIN_RETURN_IF_ERROR(reader_->Finish());
    return std::unique_ptr<const ModuleReader>(std::move(reader_));
  }

 private:
  std::string Where() const {
    return store_.is_directory ? JoinPath(store_.path, store_.files.front().name) : store_.path;
  }
  Status Fail(const std::string& message, Code code = Code::kMalformedFile) const {
    return Status(code, fmt::format("{}: {}", Printable(Where()), message));
  }
  Status FailTensor(std::string_view name, const std::string& message,
                    Code code = Code::kMalformedFile) const {
    return Fail(fmt::format("tensor \"{}\": {}", Printable(name), message), code);
  }
  Status FailNode(const OnnxNode& node, const std::string& message,
                  Code code = Code::kMalformedFile) const {
    return Fail(fmt::format("{} \"{}\": {}", Printable(node.op), Printable(node.name), message),
                code);
  }

  Status AddSource(const OnnxTensor& tensor) {
    if (EscapeUnprintable(tensor.name) != tensor.name ||
        tensor.name.find('*') != std::string_view::npos) {
      return FailTensor(tensor.name, "its name is not printable UTF-8 without '*'");
    }
    if (!by_name_.emplace(tensor.name, sources_->size()).second) {
      return FailTensor(tensor.name, "occurs twice");
    }
    Source source;
    source.tensor = tensor;
    const Mapping& mapping = *store_.files.front().mapping;
    if (tensor.external) {
      MARLIN_RETURN_IF_ERROR(FindExternal(tensor, &source));
    } else if (!tensor.numbers.empty() || tensor.bytes == 0) {
      MARLIN_ASSIGN_OR_RETURN(source.decoded, DecodeOnnxNumbers(tensor, Where()));
      decoded_bytes_ += tensor.bytes;
      if (decoded_bytes_ > kMostDecodedBytes) {
        return Fail(fmt::format("more than {} bytes outside raw_data", kMostDecodedBytes),
                    Code::kUnsupported);
      }
      source.offset = tensor.numbers.empty() ? 0 : tensor.numbers.data() - mapping.text().data();
    } else {
      source.offset = tensor.data.data() - mapping.text().data();
      source.data = mapping.data() + source.offset;
    }
    sources_->push_back(std::move(source));
    if (sources_->back().data == nullptr) sources_->back().data = sources_->back().decoded.data();
    return {};
  }

  /// Data in another file of the same directory.
  Status FindExternal(const OnnxTensor& tensor, Source* source) {
    std::string name(tensor.location);
    if (name.starts_with("./")) name.erase(0, 2);
    const bool plain = !name.empty() && name != "." && name != ".." &&
                       name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
    if (!plain) {
      return FailTensor(tensor.name,
                        fmt::format("its data are in \"{}\", which is not the name of a file in "
                                    "the model's directory",
                                    Printable(name)));
    }
    const auto [found, inserted] = external_.emplace(name, store_.files.size());
    if (inserted) MARLIN_RETURN_IF_ERROR(MapExternal(name));
    const Mapping& mapping = *store_.files[found->second].mapping;
    const std::optional<int64_t> end = (Checked(tensor.offset) + Checked(tensor.bytes)).Take();
    if (!end || *end > mapping.size()) {
      return FailTensor(tensor.name,
                        fmt::format("{} bytes at {} pass the end of \"{}\" at {}", tensor.bytes,
                                    tensor.offset, Printable(name), mapping.size()));
    }
    source->file = found->second;
    source->offset = tensor.offset;
    source->data = mapping.data() + tensor.offset;
    return {};
  }

  Status MapExternal(const std::string& name) {
    const size_t slash = store_.path.rfind('/');
    const std::string directory =
        store_.is_directory ? store_.path : store_.path.substr(0, slash + 1);  // npos + 1 is 0.
    const std::string path = store_.is_directory ? JoinPath(directory, name) : directory + name;
    MARLIN_RETURN_IF_ERROR(CheckModelFile(*store_.io, directory.empty() ? "." : directory, name));
    MARLIN_ASSIGN_OR_RETURN(const FileInfo info, store_.io->Stat(path));
    if (info.kind == FileKind::kMissing) {
      return Status(Code::kIo, Printable(path) + ": no such file");
    }
    MARLIN_ASSIGN_OR_RETURN(std::shared_ptr<const Mapping> mapping, store_.io->Map(path));
    store_.files.push_back({name, info, std::move(mapping), 0});
    return {};
  }

  const Source* Find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return name.empty() || found == by_name_.end() ? nullptr : &(*sources_)[found->second];
  }

  Status ReadNode(const OnnxNode& node) {
    if (node.op == "MatMulNBits") return ReadNBits(node);
    if (node.op == "DequantizeLinear") return ReadDequantize(node);
    if (node.op == "QMoE") return ReadExperts(node);
    if (!IsForeignOp(node)) return {};
    for (const std::string_view input : node.inputs) {
      if (Find(input) != nullptr) {
        return FailNode(node, "its weights are quantized in a way that is not supported",
                        Code::kUnsupported);
      }
    }
    return {};
  }

  // --- MatMulNBits ------------------------------------------------------------------------------

  struct NBits {
    const Source* codes = nullptr;
    const Source* scales = nullptr;
    const Source* zeros = nullptr;
    const Source* index = nullptr;     ///< The group of each k, unless groups are consecutive.
    std::vector<int32_t> permutation;  ///< Sorts k by `index`; empty: nothing does.
    int bits = 4;
    int64_t k = 0;
    int64_t n = 0;
    int64_t block = 0;
    int64_t blocks = 0;
    bool float_zeros = false;

    int64_t row_bytes() const { return blocks * block * bits / 8; }
    /// The group of weight k. A file that changes while it is read cannot lead past the groups.
    int64_t Group(int64_t at) const {
      return std::min<int64_t>(WordAt(index->data, at), blocks - 1);
    }
    int Zero(int64_t g, int64_t c) const {
      if (zeros == nullptr) return 1 << (bits - 1);
      const int64_t bytes = CeilDivide(blocks * bits, 8);
      const auto byte = static_cast<uint8_t>(zeros->data[c * bytes + g * bits / 8]);
      return byte >> (g * bits % 8) & ((1 << bits) - 1);
    }
  };

  Status ReadNBits(const OnnxNode& node) {
    NBits m;
    m.codes = Find(node.Input(1));
    m.scales = Find(node.Input(2));
    m.zeros = Find(node.Input(3));
    if (m.codes != nullptr && m.codes->scales != nullptr && m.codes->scales == m.scales) return {};
    if (m.codes == nullptr || m.scales == nullptr ||
        (m.zeros == nullptr && !node.Input(3).empty())) {
      return FailNode(node, "its codes, scales or zeros are no initializers", Code::kUnsupported);
    }
    if (node.Integer("weight_prepacked", 0) != 0) {
      return FailNode(node, "prepacked weights are not supported", Code::kUnsupported);
    }
    const int64_t bits = node.Integer("bits", 4);
    m.k = node.Integer("K", 0);
    m.n = node.Integer("N", 0);
    m.block = node.Integer("block_size", 0);
    if (bits != 2 && bits != 4 && bits != 8) {
      return FailNode(node, fmt::format("{} bits are not supported; supported: 2, 4, 8", bits),
                      Code::kUnsupported);
    }
    const bool fits = m.k > 0 && m.n > 0 && m.k <= INT32_MAX && m.n <= INT32_MAX &&
                      m.block >= kGroupGranule && m.block <= INT32_MAX &&
                      m.block % kGroupGranule == 0;
    if (!fits) {
      return FailNode(node, fmt::format("K={}, N={}, block_size={}", m.k, m.n, m.block));
    }
    m.bits = static_cast<int>(bits);
    m.blocks = CeilDivide(m.k, m.block);
    MARLIN_RETURN_IF_ERROR(CheckNBits(node, &m));
    MARLIN_RETURN_IF_ERROR(FindGroups(node, &m));
    AddNBits(m);
    return {};
  }

  /// g_idx: an int32 for each k, or for each k of whole blocks.
  Status FindGroups(const OnnxNode& node, NBits* m) {
    if (node.Input(4).empty()) return {};
    const Source* const index = Find(node.Input(4));
    if (index == nullptr) {
      return FailNode(node, "its g_idx is no initializer", Code::kUnsupported);
    }
    const OnnxTensor& tensor = index->tensor;
    const int64_t count = index->count();
    if (tensor.type != OnnxType::kI32 || (count != m->k && count != m->blocks * m->block)) {
      return FailNode(node, fmt::format("g_idx \"{}\" {} {} does not fit K={}, block_size={}",
                                        Printable(tensor.name), OnnxTypeName(tensor.type),
                                        tensor.shape.ToString(), m->k, m->block));
    }
    bool consecutive = true;
    std::vector<int32_t> groups(static_cast<size_t>(m->k));
    for (int64_t k = 0; k < m->k; ++k) {
      const auto group = static_cast<int32_t>(WordAt(index->data, k));
      if (group < 0 || group >= m->blocks) {
        return FailNode(node, fmt::format("g_idx \"{}\": group {} of {} at [{}]",
                                          Printable(tensor.name), group, m->blocks, k));
      }
      consecutive = consecutive && group == k / m->block;
      groups[static_cast<size_t>(k)] = group;
    }
    hidden_.insert(index);
    if (consecutive) return {};
    m->index = index;
    m->permutation = SortByGroup(groups, m->block);
    return {};
  }

  Status CheckNBits(const OnnxNode& node, NBits* m) const {
    const auto is_float = [](const Source& source) {
      return source.tensor.type == OnnxType::kF32 || source.tensor.type == OnnxType::kF16 ||
             source.tensor.type == OnnxType::kBf16;
    };
    const auto misfit = [&](const Source& source) {
      return FailNode(node,
                      fmt::format("\"{}\" {} {} does not fit K={}, N={}, block_size={}, "
                                  "bits={}",
                                  Printable(source.tensor.name), OnnxTypeName(source.tensor.type),
                                  source.tensor.shape.ToString(), m->k, m->n, m->block, m->bits));
    };
    if (m->codes->tensor.type != OnnxType::kU8 || m->codes->tensor.bytes != m->n * m->row_bytes()) {
      return misfit(*m->codes);
    }
    if (!is_float(*m->scales) || m->scales->count() != m->n * m->blocks) return misfit(*m->scales);
    if (m->zeros == nullptr) return {};
    m->float_zeros = is_float(*m->zeros);
    const int64_t packed = m->n * CeilDivide(m->blocks * m->bits, 8);
    const bool fits =
        m->float_zeros ? m->zeros->count() == m->n * m->blocks
                       : m->zeros->tensor.type == OnnxType::kU8 && m->zeros->tensor.bytes == packed;
    return fits ? Status() : misfit(*m->zeros);
  }

  void AddNBits(const NBits& m) {
    const Format formats[] = {Format::kInt2, m.zeros == nullptr ? Format::kS4 : Format::kU4,
                              m.zeros == nullptr ? Format::kS8 : Format::kU8};
    WeightsSpec spec{.format = formats[m.bits == 2 ? 0 : (m.bits == 4 ? 1 : 2)],
                     .k = m.k,
                     .n = m.n,
                     .group_size = std::min(m.block, m.k),
                     .scale_type = *ScaleTypeOf(*OnnxDType(m.scales->tensor.type)),
                     .has_zeros = m.zeros != nullptr};
    if (m.float_zeros) spec.zero_type = ScaleType::kF32;
    spec.has_permutation = m.index != nullptr;
    // Groups of unequal sizes have no format of their own.
    if (m.index != nullptr && m.permutation.empty()) spec = FoldedSpec(spec);
    const std::string name = NameOf(*m.codes);
    ModuleRecord record = RecordOf(name, spec);
    // The runtime rounds the product of scale and zero before it subtracts it.
    if (m.float_zeros) record.exactness = Exactness::kLastBit;
    AddModule(std::move(record), {m.codes, m.scales, m.zeros},
              [m, keep = sources_](WeightsBuffer* buffer, ThreadPool& pool) {
                return FillNBits(m, buffer, pool);
              });
  }

  static Status FillNBits(const NBits& m, WeightsBuffer* buffer, ThreadPool& pool) {
    const WeightsSpec& spec = buffer->weights.spec;
    if (m.index != nullptr && m.permutation.empty()) {
      StoreFloatRows([&m](int64_t n, float* values) { NBitsValues(m, n, values); }, *buffer, pool);
      return {};
    }
    const uint32_t flip = spec.format == Format::kS8 ? 0x80808080u : 0;
    PackDenseRows({m.codes->data, m.row_bytes(), flip, false}, *buffer, pool);
    TransposeElements(m.scales->data, 1, m.n, m.blocks, DTypeBytes(ScaleDType(spec.scale_type)),
                      buffer->scales);
    if (spec.has_permutation) MARLIN_RETURN_IF_ERROR(StoreSorted(m.permutation, buffer));
    if (!spec.has_zeros) return {};
    const int middle = spec.format == Format::kInt2 ? 2 : 0;
    const DType zero_type = *OnnxDType(m.zeros->tensor.type);
    for (int64_t g = 0; g < m.blocks; ++g) {
      for (int64_t c = 0; c < m.n; ++c) {
        const int64_t to = g * m.n + c;
        if (m.float_zeros) {
          static_cast<float*>(buffer->zeros)[to] =
              ParameterAt(m.zeros->data, zero_type, c * m.blocks + g) - static_cast<float>(middle);
        } else {
          static_cast<uint16_t*>(buffer->zeros)[to] =
              FloatToHalf(static_cast<float>(m.Zero(g, c) - middle));
        }
      }
    }
    return {};
  }

  /// The weights of output n, each with the scale of its own group.
  static void NBitsValues(const NBits& m, int64_t n, float* values) {
    const DType scale_type = *OnnxDType(m.scales->tensor.type);
    for (int64_t k = 0; k < m.k; ++k) {
      const int64_t group = m.Group(k);
      const int64_t bit = k * m.bits;
      const auto byte = static_cast<uint8_t>(m.codes->data[n * m.row_bytes() + bit / 8]);
      const auto code = static_cast<float>(byte >> (bit % 8) & ((1 << m.bits) - 1));
      const float zero =
          m.float_zeros
              ? ParameterAt(m.zeros->data, *OnnxDType(m.zeros->tensor.type), n * m.blocks + group)
              : static_cast<float>(m.Zero(group, n));
      values[k] = (code - zero) * ParameterAt(m.scales->data, scale_type, n * m.blocks + group);
    }
  }

  // --- QMoE -------------------------------------------------------------------------------------

  Status ReadExperts(const OnnxNode& node) {
    const auto find = [this](std::string_view name) { return Find(name); };
    Result<std::vector<OnnxExperts>> matrices = FindOnnxExperts(node, find);
    if (!matrices.ok()) {
      return FailNode(node, std::string(matrices.status().message()), matrices.status().code());
    }
    for (const OnnxExperts& m : *matrices) {
      if (m.codes->scales != nullptr && m.codes->scales == m.scales) continue;
      ModuleRecord record = RecordOf(NameOf(*m.codes), m.spec);
      record.stacked = true;
      AddModule(std::move(record), {m.codes, m.scales, m.zeros},
                [m, keep = sources_](WeightsBuffer* buffer, ThreadPool& pool) {
                  FillOnnxExperts(m, buffer, pool);
                  return Status();
                });
    }
    return {};
  }

  // --- DequantizeLinear -------------------------------------------------------------------------

  Status ReadDequantize(const OnnxNode& node) {
    Dequantized m;
    m.codes = Find(node.Input(0));
    if (m.codes == nullptr) return {};  // It dequantizes activations.
    // Optimizers merge equal initializers, and a weight may have several users.
    if (m.codes->scales != nullptr && m.codes->scales == Find(node.Input(1))) return {};
    m.scales = Find(node.Input(1));
    m.zeros = Find(node.Input(2));
    if (m.scales == nullptr || (m.zeros == nullptr && !node.Input(2).empty())) {
      return FailNode(node, "its scales or zeros are no initializers", Code::kUnsupported);
    }
    const OnnxTensor& codes = m.codes->tensor;
    const int rank = codes.shape.rank();
    m.axis = node.Integer("axis", 1);
    if (m.axis < 0) m.axis += rank;
    m.block = node.Integer("block_size", 0);
    if (m.block == 0 && m.scales->count() == 1) m.axis = 0;
    MARLIN_RETURN_IF_ERROR(CheckDequantize(node, m));
    if (rank != 2 || codes.type == OnnxType::kI32 || codes.bytes == 0) {
      return AddValues(node, m);
    }
    m.out_in = IsOutIn(node.outputs.empty() ? std::string_view() : node.outputs.front(), m);
    m.k = codes.shape[m.out_in ? 1 : 0];
    m.n = codes.shape[m.out_in ? 0 : 1];
    AddDequantized(m);
    return {};
  }

  Status CheckDequantize(const OnnxNode& node, const Dequantized& m) const {
    const OnnxTensor& codes = m.codes->tensor;
    const Shape& shape = codes.shape;
    const int rank = shape.rank();
    const OnnxType types[] = {
        OnnxType::kI8, OnnxType::kU8,     OnnxType::kI4,     OnnxType::kU4,     OnnxType::kI2,
        OnnxType::kU2, OnnxType::kF8E4M3, OnnxType::kF8E5M2, OnnxType::kF4E2M1, OnnxType::kI32};
    if (std::find(std::begin(types), std::end(types), codes.type) == std::end(types)) {
      return FailNode(node,
                      fmt::format("codes of type {} are not supported", OnnxTypeName(codes.type)),
                      Code::kUnsupported);
    }
    const OnnxType scale = m.scales->tensor.type;
    if (scale != OnnxType::kF32 && scale != OnnxType::kF16 && scale != OnnxType::kBf16 &&
        scale != OnnxType::kF8E8M0) {
      return FailNode(node, "scales of type " + OnnxTypeName(scale));
    }
    Shape expected;  // The shape of the scales.
    const bool whole = m.block == 0 && m.scales->count() == 1;
    if (!whole && (m.axis < 0 || m.axis >= rank || m.block < 0)) {
      return FailNode(
          node, fmt::format("axis {} of {} dimensions, block_size {}", m.axis, rank, m.block));
    }
    for (int i = 0; i < rank && !whole; ++i) {
      if (m.block != 0) {
        expected.Append(i == m.axis ? CeilDivide(shape[i], m.block) : shape[i]);
      } else if (i == m.axis) {
        expected.Append(shape[i]);
      }
    }
    const bool fits = whole || m.scales->tensor.shape == expected;
    const bool zeros_fit =
        m.zeros == nullptr ||
        (m.zeros->tensor.type == codes.type && m.zeros->count() == m.scales->count() &&
         (!(IsFloat(codes.type) || codes.type == OnnxType::kI32) ||
          std::all_of(m.zeros->data, m.zeros->data + m.zeros->tensor.bytes,
                      [](std::byte byte) { return byte == std::byte{0}; })));
    if (fits && zeros_fit) return {};
    const OnnxTensor& wrong = fits ? m.zeros->tensor : m.scales->tensor;
    return FailNode(
        node, fmt::format("\"{}\" {} {} does not fit {} {} (axis={}, block_size={})",
                          Printable(wrong.name), OnnxTypeName(wrong.type), wrong.shape.ToString(),
                          OnnxTypeName(codes.type), shape.ToString(), m.axis, m.block));
  }

  /// Whether a matrix is used as [out, in]. Without a user, blocks are taken to run along k.
  bool IsOutIn(std::string_view value, const Dequantized& m) const {
    const bool blocks_along_columns = m.block != 0 && m.axis == 1 && !uses_.IsUsed(value);
    const SourceLayout fallback =
        blocks_along_columns ? SourceLayout::kOutIn : SourceLayout::kInOut;
    return uses_.LayoutOf(value).value_or(fallback) == SourceLayout::kOutIn;
  }

  static Held HeldAs(OnnxType type, bool zeros) {
    switch (type) {
      case OnnxType::kI4:
        return zeros ? Held{Format::kU4, 8, 8} : Held{Format::kS4, 0, 8};
      case OnnxType::kU4:
        return {Format::kU4, 0, 0};
      case OnnxType::kI2:
        return {Format::kInt2, 0, 2};
      case OnnxType::kU2:
        return {Format::kInt2, -2, 0};
      case OnnxType::kI8:
        return {Format::kS8, 0, 0};
      case OnnxType::kF8E4M3:
        return {Format::kFp8E4M3, 0, 0};
      case OnnxType::kF8E5M2:
        return {Format::kFp8E5M2, 0, 0};
      case OnnxType::kF4E2M1:
        return {Format::kFp4E2M1, 0, 0};
      default:
        return {Format::kU8, 0, 0};
    }
  }

  static bool IsFloat(OnnxType type) {
    return type == OnnxType::kF8E4M3 || type == OnnxType::kF8E5M2 || type == OnnxType::kF4E2M1;
  }

  /// Zeros of floats are 0 by definition, and those of signed integers often.
  static bool HasZeros(const Dequantized& m) {
    const OnnxType type = m.codes->tensor.type;
    if (IsFloat(type)) return false;
    if (type == OnnxType::kU8 || type == OnnxType::kU4 || type == OnnxType::kU2) return true;
    for (int64_t i = 0; m.zeros != nullptr && i < m.zeros->count(); ++i) {
      if (m.zeros->Integer(i) != 0) return true;
    }
    return false;
  }

  void AddDequantized(const Dequantized& m) {
    const bool zeros = HasZeros(m);
    const Held held = HeldAs(m.codes->tensor.type, zeros);
    const std::string name = NameOf(*m.codes);
    // A scale for each k, or for few of them, has no format.
    const bool per_k = m.scales->count() > 1 && m.AlongK() != (m.block != 0);
    const int64_t group = m.block != 0 ? std::min(m.block, m.k) : m.k;
    WeightsSpec spec{.format = Format::kFp32, .k = m.k, .n = m.n, .group_size = m.k};
    if (!per_k && (group % kGroupGranule == 0 || group == m.k)) {
      spec.format = held.format;
      spec.group_size = group;
      const OnnxType scale = m.scales->tensor.type;
      spec.scale_type =
          scale == OnnxType::kF8E8M0 ? ScaleType::kE8M0 : *ScaleTypeOf(*OnnxDType(scale));
      spec.has_zeros = zeros;
    }
    ModuleRecord record = RecordOf(name, spec);
    AddModule(std::move(record), {m.codes, m.scales, m.zeros},
              [m, held, keep = sources_](WeightsBuffer* buffer, ThreadPool& pool) {
                FillDequantized(m, held, buffer, pool);
                return Status();
              });
  }

  static float ValueAt(const Dequantized& m, int64_t index, int64_t scale_index) {
    const OnnxTensor& codes = m.codes->tensor;
    const float scale = ParameterAt(m.scales->data, *OnnxDType(m.scales->tensor.type), scale_index);
    if (codes.type == OnnxType::kF4E2M1) {
      const int bit = static_cast<int>(index % 2) * 4;
      const auto code = static_cast<uint8_t>(m.codes->data[index / 2]) >> bit & 15;
      return FormatValues(Format::kFp4E2M1)[static_cast<size_t>(code)] * scale;
    }
    if (IsFloat(codes.type))
      return ParameterAt(m.codes->data, *OnnxDType(codes.type), index) * scale;
    const int zero =
        m.zeros == nullptr || codes.type == OnnxType::kI32 ? 0 : m.zeros->Integer(scale_index);
    if (codes.type == OnnxType::kI32) {
      return static_cast<float>(static_cast<int32_t>(WordAt(m.codes->data, index))) * scale;
    }
    return static_cast<float>(m.codes->Integer(index) - zero) * scale;
  }

  static void FillDequantized(const Dequantized& m, const Held& held, WeightsBuffer* buffer,
                              ThreadPool& pool) {
    const WeightsSpec& spec = buffer->weights.spec;
    if (!GetFormatInfo(spec.format).quantized) {
      const auto values = [&](int64_t n, float* out) {
        for (int64_t k = 0; k < m.k; ++k) out[k] = ValueAt(m, m.Index(k, n), m.ScaleIndex(k, n));
      };
      return StoreFloatRows(values, *buffer, pool);
    }
    const int bits = OnnxBits(m.codes->tensor.type);
    const auto unpack = [&](int64_t n, uint8_t* codes) {
      for (int64_t k = 0; k < m.k; ++k) {
        const int64_t bit = m.Index(k, n) * bits;
        const auto byte = static_cast<uint8_t>(m.codes->data[bit / 8]);
        codes[k] = static_cast<uint8_t>((byte >> (bit % 8) & ((1 << bits) - 1)) ^ held.flip);
      }
    };
    PackByteRows(unpack, *buffer, pool);
    const int64_t width = DTypeBytes(ScaleDType(spec.scale_type));
    for (int64_t g = 0; g < GroupCount(spec); ++g) {
      for (int64_t n = 0; n < m.n; ++n) {
        const int64_t from = m.ScaleIndex(g * spec.group_size, n);
        const int64_t to = g * m.n + n;
        std::memcpy(static_cast<std::byte*>(buffer->scales) + to * width,
                    m.scales->data + from * width, static_cast<size_t>(width));
        if (!spec.has_zeros) continue;
        const int zero = m.zeros == nullptr ? 0 : m.zeros->Integer(from);
        static_cast<uint16_t*>(buffer->zeros)[to] =
            FloatToHalf(static_cast<float>(zero + held.offset));
      }
    }
  }

  /// A quantized tensor that is no matrix: its values in fp32.
  Status AddValues(const OnnxNode& node, const Dequantized& m) {
    const Shape& shape = m.codes->tensor.shape;
    const std::optional<int64_t> bytes = (Checked(m.codes->count()) * Checked(4)).Take();
    if (!bytes) return FailNode(node, fmt::format("the size of {} overflows", shape.ToString()));
    // Elements of one scale follow each other, `inner` at a time, for each index of the axis.
    int64_t inner = 1;
    for (int i = static_cast<int>(m.axis) + 1; i < shape.rank(); ++i) inner *= shape[i];
    const int64_t length = m.scales->count() == 1 ? 1 : shape[static_cast<int>(m.axis)];
    const int64_t block = std::max<int64_t>(m.block, 1);
    const auto compute = [m, inner, length, block, keep = sources_](std::byte* out) {
      const int64_t blocks = CeilDivide(length, block);
      for (int64_t i = 0; i < m.codes->count(); ++i) {
        int64_t scale = 0;
        if (m.scales->count() > 1) {
          const int64_t at = i / inner % length;
          scale =
              m.block == 0 ? at : (i / (inner * length) * blocks + at / block) * inner + i % inner;
        }
        const float value = ValueAt(m, i, scale);
        std::memcpy(out + i * 4, &value, sizeof(value));
      }
    };
    for (const Source* part : {m.codes, m.scales, m.zeros}) {
      if (part != nullptr) hidden_.insert(part);
    }
    (*sources_)[by_name_.at(m.codes->tensor.name)].scales = m.scales;
    values_.push_back({NameOf(*m.codes), shape, *bytes, m.codes, compute});
    return {};
  }

  // --- the store --------------------------------------------------------------------------------

  /// Whether a plain initializer holds matrices the other way round than a checkpoint of its type
  /// of model does: [in, out] where products read it so, while linear layers are [out, in].
  bool IsTransposed(const OnnxTensor& tensor) const {
    const int rank = tensor.shape.rank();
    if ((rank != 2 && rank != 3) || tensor.bytes == 0) return false;
    const std::optional<SourceLayout> used = uses_.LayoutOf(tensor.name);
    return used && *used != SourceLayoutOf(store_.config(), tensor.name);
  }

  /// The name of a weight: that of its codes without what quantizers append.
  std::string NameOf(const Source& codes) {
    std::string_view name = codes.tensor.name;
    for (const std::string_view suffix :
         {"_quantized", "_quant", "_DQ_Q2", "_DQ_Q4", "_DQ_Q8", "_Q2", "_Q4", "_Q8", ".qweight"}) {
      if (name.ends_with(suffix) && name.size() > suffix.size()) {
        name.remove_suffix(suffix.size());
        break;
      }
    }
    std::string plain(name);
    // A name of an initializer stays unique.
    return taken_.insert(plain).second && Find(plain) == nullptr ? plain
                                                                 : std::string(codes.tensor.name);
  }

  void AddModule(ModuleRecord record, const std::vector<const Source*>& parts,
                 ListedReader::Fill fill) {
    // A plain checkpoint has the matrix as its type of model says, whatever the graph does with it.
    record.layout = SourceLayoutOf(store_.config(), record.module.name);
    // Scales and zeros that several modules share are parts of the first.
    std::vector<std::pair<ModulePart, const Source*>> own;
    const ModulePart kinds[] = {ModulePart::kCodes, ModulePart::kScales, ModulePart::kZeros};
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts[i] == nullptr || (!used_.insert(parts[i]).second && i > 0)) continue;
      own.emplace_back(kinds[i], parts[i]);
    }
    (*sources_)[by_name_.at(parts[0]->tensor.name)].scales = parts[1];
    // Tensors have numbers once the store is sorted.
    modules_.push_back([this, record = std::move(record), own, fill = std::move(fill)] {
      std::vector<PartTensor> tensors;
      tensors.reserve(own.size());
      for (const auto& [part, source] : own) {
        tensors.push_back({part, *store_.FindTensor(source->tensor.name)});
      }
      reader_->Add(record, std::move(tensors), fill);
    });
  }

  Status Store() {
    std::map<std::string, std::function<void(std::byte*)>> computed;
    for (const Source& source : *sources_) {
      if (hidden_.contains(&source) && !used_.contains(&source)) continue;
      const OnnxTensor& tensor = source.tensor;
      const std::optional<DType> dtype = OnnxDType(tensor.type);
      if (!dtype && !used_.contains(&source)) {
        return FailTensor(tensor.name,
                          fmt::format("{} elements that no node dequantizes are not supported",
                                      OnnxTypeName(tensor.type)),
                          Code::kUnsupported);
      }
      const std::string name(tensor.name);
      const bool transposed = !used_.contains(&source) && IsTransposed(tensor);
      Shape shape = dtype ? tensor.shape : Shape{tensor.bytes};
      if (transposed) std::swap(shape[shape.rank() - 2], shape[shape.rank() - 1]);
      store_.tensors.push_back({name, dtype.value_or(DType::kU8), shape,
                                store_.files[source.file].name, source.offset, tensor.bytes});
      if (transposed) {
        computed[name] = [from = &source, keep = sources_](std::byte* out) {
          from->WriteTransposed(out);
        };
      } else if (!source.decoded.empty()) {
        computed[name] = [from = &source, keep = sources_](std::byte* out) {
          std::memcpy(out, from->decoded.data(), from->decoded.size());
        };
      }
    }
    for (const Values& values : values_) {
      store_.tensors.push_back({values.name, DType::kF32, values.shape,
                                store_.files[values.codes->file].name, values.codes->offset,
                                values.bytes});
      if (values.bytes > 0) computed[values.name] = values.compute;
    }
    if (store_.tensors.empty()) return Fail("holds no initializers");
    if (static_cast<int64_t>(store_.tensors.size()) > kMaxTensorCount) {
      return Fail(fmt::format("more than {} tensors", kMaxTensorCount));
    }
    MARLIN_RETURN_IF_ERROR(SortTensors(&store_));
    for (auto& [name, compute] : computed) {
      store_.computed.emplace(*store_.FindTensor(name), std::move(compute));
    }
    return {};
  }

  static constexpr int64_t kMostDecodedBytes = int64_t{64} << 20;

  struct Values {
    std::string name;
    Shape shape;
    int64_t bytes = 0;
    const Source* codes = nullptr;
    std::function<void(std::byte*)> compute;
  };

  TensorStore& store_;
  std::unique_ptr<ListedReader> reader_;
  OnnxFile file_;
  /// Shared with the functions that load modules. It does not grow once nodes are read.
  std::shared_ptr<std::vector<Source>> sources_;
  std::unordered_map<std::string_view, size_t> by_name_;
  std::map<std::string, size_t> external_;  ///< Numbers of files by name.
  OnnxUses uses_;
  std::set<const Source*> used_;    ///< Parts of modules.
  std::set<const Source*> hidden_;  ///< Parts of tensors that are computed.
  std::set<std::string> taken_;     ///< Names of modules.
  std::vector<std::function<void()>> modules_;
  std::vector<Values> values_;
  int64_t decoded_bytes_ = 0;
};

}  // namespace

OpenReader OpenOnnx;

Result<std::unique_ptr<const ModuleReader>> OpenOnnx(TensorStore& store,
                                                     const QuantMethod& /*method*/) {
  return OnnxReader(store).Open();
}

}  // namespace marlin
