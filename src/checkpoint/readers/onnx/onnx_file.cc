#include "checkpoint/readers/onnx/onnx_file.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <iterator>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/files/safetensors.h"

namespace marlin {
namespace {

constexpr int64_t kMaxNodes = int64_t{1} << 22;
/// Memory for integers of variable length, which take less in the file than decoded.
constexpr int64_t kMaxDecodedBytes = int64_t{64} << 20;

enum class Wire : uint64_t { kVarint = 0, k64 = 1, kBytes = 2, k32 = 5 };

/// One field of a message.
struct Field {
  uint64_t number = 0;
  Wire wire = Wire::kVarint;
  uint64_t value = 0;      ///< The number of a varint.
  std::string_view bytes;  ///< A message, a string, packed numbers, or a fixed number.

  int64_t Integer() const { return static_cast<int64_t>(value); }
};

/// Takes the fields of a message in turn.
class Message {
 public:
  explicit Message(std::string_view bytes) : rest_(bytes) {}

  bool done() const { return rest_.empty(); }
  const char* position() const { return rest_.data(); }

  /// The next variable-length number; nothing if it is cut off or longer than 64 bits.
  std::optional<uint64_t> Varint() {
    uint64_t value = 0;
    for (size_t i = 0; i < std::min<size_t>(rest_.size(), 10); ++i) {
      const auto byte = static_cast<uint8_t>(rest_[i]);
      if (i == 9 && byte > 1) return std::nullopt;
      value |= uint64_t{byte & 0x7fu} << (7 * i);
      if (byte < 0x80) {
        rest_.remove_prefix(i + 1);
        return value;
      }
    }
    return std::nullopt;
  }

  /// Nothing for a field that is cut off or of a kind that no current writer uses.
  std::optional<Field> Next() {
    const std::optional<uint64_t> tag = Varint();
    if (!tag || *tag >> 3 == 0 || *tag >> 32 != 0) return std::nullopt;
    Field field;
    field.number = *tag >> 3;
    field.wire = static_cast<Wire>(*tag & 7);
    switch (field.wire) {
      case Wire::kVarint: {
        const std::optional<uint64_t> value = Varint();
        if (!value) return std::nullopt;
        field.value = *value;
        return field;
      }
      case Wire::kBytes: {
        const std::optional<uint64_t> size = Varint();
        if (!size || *size > rest_.size()) return std::nullopt;
        return Take(*size, field);
      }
      case Wire::k64:
        return Take(8, field);
      case Wire::k32:
        return Take(4, field);
    }
    return std::nullopt;
  }

 private:
  std::optional<Field> Take(uint64_t size, Field field) {
    if (size > rest_.size()) return std::nullopt;
    field.bytes = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return field;
  }

  std::string_view rest_;
};

/// The numbers of the fields, by message.
enum Model : uint64_t { kGraph = 7 };
enum Graph : uint64_t { kNode = 1, kInitializer = 5, kSparse = 15 };
enum Node : uint64_t { kIn = 1, kOut = 2, kNodeName = 3, kOp = 4, kAttribute = 5, kDomain = 7 };
enum Attribute : uint64_t { kAttributeName = 1, kInteger = 3, kText = 4, kIntegers = 8 };
enum Tensor : uint64_t {
  kDims = 1,
  kType = 2,
  kSegment = 3,
  kFloats = 4,
  kInt32s = 5,
  kInt64s = 7,
  kTensorName = 8,
  kRaw = 9,
  kDoubles = 10,
  kUint64s = 11,
  kExternal = 13,
  kDataLocation = 14,
};
enum Entry : uint64_t { kEntryKey = 1, kEntryValue = 2 };

struct TypeRow {
  OnnxType type;
  int bits;
  std::string_view name;
  std::optional<DType> dtype = std::nullopt;
};
constexpr TypeRow kTypeRows[] = {
    {OnnxType::kF32, 32, "FLOAT", DType::kF32},
    {OnnxType::kU8, 8, "UINT8", DType::kU8},
    {OnnxType::kI8, 8, "INT8", DType::kI8},
    {OnnxType::kU16, 16, "UINT16", DType::kU16},
    {OnnxType::kI16, 16, "INT16", DType::kI16},
    {OnnxType::kI32, 32, "INT32", DType::kI32},
    {OnnxType::kI64, 64, "INT64", DType::kI64},
    {OnnxType::kString, 0, "STRING"},
    {OnnxType::kBool, 8, "BOOL", DType::kBool},
    {OnnxType::kF16, 16, "FLOAT16", DType::kF16},
    {OnnxType::kF64, 64, "DOUBLE", DType::kF64},
    {OnnxType::kU32, 32, "UINT32", DType::kU32},
    {OnnxType::kU64, 64, "UINT64", DType::kU64},
    {OnnxType::kBf16, 16, "BFLOAT16", DType::kBf16},
    {OnnxType::kF8E4M3, 8, "FLOAT8E4M3FN", DType::kF8E4M3},
    {OnnxType::kF8E5M2, 8, "FLOAT8E5M2", DType::kF8E5M2},
    {OnnxType::kU4, 4, "UINT4"},
    {OnnxType::kI4, 4, "INT4"},
    {OnnxType::kF4E2M1, 4, "FLOAT4E2M1"},
    {OnnxType::kF8E8M0, 8, "FLOAT8E8M0", DType::kF8E8M0},
    {OnnxType::kU2, 2, "UINT2"},
    {OnnxType::kI2, 2, "INT2"},
};

const TypeRow* FindRow(OnnxType type) {
  const auto* const found = std::find_if(std::begin(kTypeRows), std::end(kTypeRows),
                                         [type](const TypeRow& row) { return row.type == type; });
  return found == std::end(kTypeRows) ? nullptr : found;
}

class OnnxParser {
 public:
  OnnxParser(std::string_view file, const std::string& where) : file_(file), where_(where) {}

  Result<OnnxFile> Run() {
    Message model(file_);
    std::optional<std::string_view> graph;
    while (!model.done()) {
      MARLIN_ASSIGN_OR_RETURN(const Field field, Next(&model, "model"));
      if (field.number != kGraph) continue;
      if (graph) return Fail("has two graphs");
      MARLIN_RETURN_IF_ERROR(Expect(field, Wire::kBytes, "graph"));
      graph = field.bytes;
    }
    if (!graph) return Fail("holds no graph");
    MARLIN_RETURN_IF_ERROR(ReadGraph(*graph));
    return std::move(out_);
  }

 private:
  Status Fail(const std::string& message, Code code = Code::kMalformedFile) const {
    return Status(code, fmt::format("{}: {}", Printable(where_), message));
  }
  Status FailTensor(const OnnxTensor& tensor, const std::string& message,
                    Code code = Code::kMalformedFile) const {
    return Fail(fmt::format("tensor \"{}\": {}", Printable(tensor.name), message), code);
  }

  Result<Field> Next(Message* message, std::string_view what) const {
    const int64_t at = message->position() - file_.data();
    std::optional<Field> field = message->Next();
    if (!field) return Fail(fmt::format("a broken field of a {} at byte {}", what, at));
    return *field;
  }

  Status Expect(const Field& field, Wire wire, std::string_view what) const {
    if (field.wire == wire) return {};
    return Fail(fmt::format("{}: field {} has wire type {}, expected {}", what, field.number,
                            static_cast<uint64_t>(field.wire), static_cast<uint64_t>(wire)));
  }

  Status ReadGraph(std::string_view bytes) {
    Message graph(bytes);
    while (!graph.done()) {
      MARLIN_ASSIGN_OR_RETURN(const Field field, Next(&graph, "graph"));
      if (field.number == kSparse) {
        return Fail("sparse initializers are not supported", Code::kUnsupported);
      }
      if (field.number != kNode && field.number != kInitializer) continue;
      MARLIN_RETURN_IF_ERROR(Expect(field, Wire::kBytes, "graph"));
      MARLIN_RETURN_IF_ERROR(field.number == kNode ? ReadNode(field.bytes)
                                                   : ReadTensor(field.bytes));
    }
    return {};
  }

  Status ReadNode(std::string_view bytes) {
    if (static_cast<int64_t>(out_.nodes.size()) >= kMaxNodes) {
      return Fail(fmt::format("more than {} nodes", kMaxNodes));
    }
    OnnxNode node;
    Message message(bytes);
    while (!message.done()) {
      MARLIN_ASSIGN_OR_RETURN(const Field field, Next(&message, "node"));
      if (field.number > kDomain || field.number == 6) continue;
      MARLIN_RETURN_IF_ERROR(Expect(field, Wire::kBytes, "node"));
      if (field.number == kIn) node.inputs.push_back(field.bytes);
      if (field.number == kOut) node.outputs.push_back(field.bytes);
      if (field.number == kNodeName) node.name = field.bytes;
      if (field.number == kOp) node.op = field.bytes;
      if (field.number == kDomain) node.domain = field.bytes;
      if (field.number == kAttribute) MARLIN_RETURN_IF_ERROR(ReadAttribute(field.bytes, &node));
    }
    out_.nodes.push_back(std::move(node));
    return {};
  }

  Status ReadAttribute(std::string_view bytes, OnnxNode* node) const {
    std::string_view name;
    std::string_view text;
    std::optional<int64_t> integer;
    std::vector<int64_t> integers;
    Message message(bytes);
    while (!message.done()) {
      MARLIN_ASSIGN_OR_RETURN(const Field field, Next(&message, "attribute"));
      if (field.number == kAttributeName) {
        MARLIN_RETURN_IF_ERROR(Expect(field, Wire::kBytes, "attribute"));
        name = field.bytes;
      } else if (field.number == kInteger) {
        MARLIN_RETURN_IF_ERROR(Expect(field, Wire::kVarint, "attribute"));
        integer = field.Integer();
      } else if (field.number == kText) {
        MARLIN_RETURN_IF_ERROR(Expect(field, Wire::kBytes, "attribute"));
        text = field.bytes;
      } else if (field.number == kIntegers) {
        MARLIN_RETURN_IF_ERROR(ReadIntegers(field, kMaxRank, &integers));
      }
    }
    if (integer) node->integers.emplace_back(name, *integer);
    if (name == "quant_type") node->quant_type = text;
    if (name == "perm") node->permutation = std::move(integers);
    return {};
  }

  /// One integer, or a run of them; more than `most` are left out.
  Status ReadIntegers(const Field& field, int64_t most, std::vector<int64_t>* integers) const {
    const auto add = [&](uint64_t value) {
      if (static_cast<int64_t>(integers->size()) <= most) {
        integers->push_back(static_cast<int64_t>(value));
      }
    };
    if (field.wire == Wire::kVarint) {
      add(field.value);
      return {};
    }
    MARLIN_RETURN_IF_ERROR(Expect(field, Wire::kBytes, "integers"));
    Message run(field.bytes);
    while (!run.done()) {
      const std::optional<uint64_t> value = run.Varint();
      if (!value)
        return Fail(fmt::format("a broken integer at byte {}", run.position() - file_.data()));
      add(*value);
    }
    return {};
  }

  /// The fields of a tensor before they are put together.
  struct Parts {
    std::vector<int64_t> dims;
    int64_t type = 0;
    bool external = false;
    std::vector<std::pair<uint64_t, std::string_view>> data;  ///< By the number of the field.
    std::vector<std::pair<std::string_view, std::string_view>> entries;
  };

  Status ReadTensor(std::string_view bytes) {
    if (static_cast<int64_t>(out_.tensors.size()) >= kMaxTensorCount) {
      return Fail(fmt::format("more than {} tensors", kMaxTensorCount));
    }
    OnnxTensor tensor;
    Parts parts;
    Message message(bytes);
    while (!message.done()) {
      MARLIN_ASSIGN_OR_RETURN(const Field field, Next(&message, "tensor"));
      MARLIN_RETURN_IF_ERROR(ReadTensorField(field, &tensor, &parts));
    }
    MARLIN_RETURN_IF_ERROR(SetShape(parts, &tensor));
    MARLIN_RETURN_IF_ERROR(parts.external ? SetExternal(parts, &tensor) : SetData(parts, &tensor));
    out_.tensors.push_back(tensor);
    return {};
  }

  Status ReadTensorField(const Field& field, OnnxTensor* tensor, Parts* parts) const {
    switch (field.number) {
      case kDims:
        return ReadIntegers(field, kMaxRank, &parts->dims);
      case kType:
        parts->type = field.Integer();
        return Expect(field, Wire::kVarint, "tensor");
      case kSegment:
        return Fail("a tensor in segments is not supported", Code::kUnsupported);
      case kTensorName:
        tensor->name = field.bytes;
        return Expect(field, Wire::kBytes, "tensor");
      case kDataLocation:
        parts->external = field.value == 1;
        return Expect(field, Wire::kVarint, "tensor");
      case kExternal:
        MARLIN_RETURN_IF_ERROR(Expect(field, Wire::kBytes, "tensor"));
        return ReadEntry(field.bytes, parts);
      case kFloats:
      case kInt32s:
      case kInt64s:
      case kRaw:
      case kDoubles:
      case kUint64s:
        // Writers of proto3 pack numbers: one field holds all of them.
        MARLIN_RETURN_IF_ERROR(Expect(field, Wire::kBytes, "tensor"));
        parts->data.emplace_back(field.number, field.bytes);
        return {};
      default:
        return {};
    }
  }

  Status ReadEntry(std::string_view bytes, Parts* parts) const {
    std::pair<std::string_view, std::string_view> entry;
    Message message(bytes);
    while (!message.done()) {
      MARLIN_ASSIGN_OR_RETURN(const Field field, Next(&message, "entry"));
      if (field.number == kEntryKey) entry.first = field.bytes;
      if (field.number == kEntryValue) entry.second = field.bytes;
    }
    parts->entries.push_back(entry);
    return {};
  }

  Status SetShape(const Parts& parts, OnnxTensor* tensor) const {
    tensor->type = static_cast<OnnxType>(parts.type);
    const int bits = OnnxBits(tensor->type);
    if (tensor->name.empty()) return Fail("a tensor has no name");
    if (static_cast<int64_t>(tensor->name.size()) > kMaxNameBytes) {
      return FailTensor(*tensor, fmt::format("a name of {} bytes, at most {} are read",
                                             tensor->name.size(), kMaxNameBytes));
    }
    if (bits == 0) {
      return FailTensor(
          *tensor, fmt::format("elements of type {} are not supported", OnnxTypeName(tensor->type)),
          Code::kUnsupported);
    }
    if (parts.dims.size() > static_cast<size_t>(kMaxRank)) {
      return FailTensor(*tensor, fmt::format("more than {} dimensions", kMaxRank));
    }
    Checked count(1);
    Checked all(1);  // A zero dimension hides the overflow of the others.
    for (const int64_t dim : parts.dims) {
      if (dim < 0) return FailTensor(*tensor, fmt::format("the dimension {}", dim));
      tensor->shape.Append(dim);
      count = count * Checked(dim);
      all = all * Checked(std::max<int64_t>(dim, 1));
    }
    const std::optional<int64_t> bytes = CeilDiv(count * Checked(bits), Checked(8)).Take();
    if (!bytes || !(all * Checked(8)).valid()) {
      return FailTensor(*tensor, fmt::format("the size of {} overflows", tensor->shape.ToString()));
    }
    tensor->bytes = *bytes;
    return {};
  }

  /// Elements in the file: raw, a run of fixed numbers, or integers of variable length.
  Status SetData(const Parts& parts, OnnxTensor* tensor) const {
    if (parts.data.empty() && tensor->bytes == 0) return {};
    if (parts.data.size() != 1) {
      return FailTensor(*tensor, fmt::format("{} fields of data, expected 1", parts.data.size()));
    }
    const auto& [number, bytes] = parts.data.front();
    const bool fixed = number == kRaw || (number == kFloats && tensor->type == OnnxType::kF32) ||
                       (number == kDoubles && tensor->type == OnnxType::kF64);
    if (!fixed && !HoldsIntegers(number, tensor->type)) {
      return FailTensor(
          *tensor, fmt::format("field {} does not hold {}", number, OnnxTypeName(tensor->type)));
    }
    if (!fixed) {
      tensor->numbers = bytes;
      return {};
    }
    if (static_cast<int64_t>(bytes.size()) != tensor->bytes) {
      return FailTensor(*tensor, fmt::format("{} bytes of data, {} {} has {}", bytes.size(),
                                             tensor->shape.ToString(), OnnxTypeName(tensor->type),
                                             tensor->bytes));
    }
    tensor->data = bytes;
    return {};
  }

  static bool HoldsIntegers(uint64_t field, OnnxType type) {
    const bool wide = type == OnnxType::kU32 || type == OnnxType::kU64;
    if (field == kInt64s) return type == OnnxType::kI64;
    if (field == kUint64s) return wide;
    return field == kInt32s && !wide && type != OnnxType::kI64 && type != OnnxType::kF32 &&
           type != OnnxType::kF64;
  }

  Status SetExternal(const Parts& parts, OnnxTensor* tensor) const {
    tensor->external = true;
    int64_t length = tensor->bytes;
    for (const auto& [key, value] : parts.entries) {
      if (key == "location") tensor->location = value;
      if (key != "offset" && key != "length") continue;
      int64_t number = -1;
      const char* const end = value.data() + value.size();
      const auto parsed = std::from_chars(value.data(), end, number);
      if (parsed.ec != std::errc() || parsed.ptr != end || number < 0) {
        return FailTensor(*tensor,
                          fmt::format("external {} \"{}\" is not a size", key, Printable(value)));
      }
      (key == "offset" ? tensor->offset : length) = number;
    }
    if (length != tensor->bytes) {
      return FailTensor(*tensor, fmt::format("{} bytes of external data, {} {} has {}", length,
                                             tensor->shape.ToString(), OnnxTypeName(tensor->type),
                                             tensor->bytes));
    }
    return {};
  }

  std::string_view file_;
  const std::string& where_;
  OnnxFile out_;
};

}  // namespace

int OnnxBits(OnnxType type) {
  const TypeRow* const row = FindRow(type);
  return row == nullptr ? 0 : row->bits;
}

std::string OnnxTypeName(OnnxType type) {
  const TypeRow* const row = FindRow(type);
  return row == nullptr ? std::to_string(static_cast<int64_t>(type)) : std::string(row->name);
}

std::optional<DType> OnnxDType(OnnxType type) {
  const TypeRow* const row = FindRow(type);
  return row == nullptr ? std::nullopt : row->dtype;
}

int64_t OnnxNode::Integer(std::string_view attribute, int64_t fallback) const {
  for (const auto& [key, value] : integers) {
    if (key == attribute) return value;
  }
  return fallback;
}

Result<OnnxFile> ParseOnnx(std::string_view file, const std::string& where) {
  return OnnxParser(file, where).Run();
}

Result<std::vector<std::byte>> DecodeOnnxNumbers(const OnnxTensor& tensor,
                                                 const std::string& where) {
  const auto fail = [&](Code code, const std::string& message) {
    return Status(code, fmt::format("{}: tensor \"{}\": {}", Printable(where),
                                    Printable(tensor.name), message));
  };
  if (tensor.bytes > kMaxDecodedBytes) {
    return fail(Code::kUnsupported, fmt::format("{} bytes outside raw_data, at most {} are read",
                                                tensor.bytes, kMaxDecodedBytes));
  }
  // Elements of less than a byte come packed, a byte to a number.
  const int64_t width = std::max(1, OnnxBits(tensor.type) / 8);
  std::vector<std::byte> out(static_cast<size_t>(tensor.bytes));
  Message run(tensor.numbers);
  int64_t at = 0;
  for (; !run.done() && at + width <= tensor.bytes; at += width) {
    const std::optional<uint64_t> value = run.Varint();
    if (!value) break;
    std::memcpy(out.data() + at, &*value, static_cast<size_t>(width));
  }
  if (!run.done() || at != tensor.bytes) {
    return fail(Code::kMalformedFile, fmt::format("its integers are not the {} of {}",
                                                  tensor.bytes / width, tensor.shape.ToString()));
  }
  return out;
}

}  // namespace marlin
