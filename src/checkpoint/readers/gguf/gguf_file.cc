#include "checkpoint/readers/gguf/gguf_file.h"

#include <fmt/core.h>

#include <bit>
#include <cstring>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/files/safetensors.h"
#include "checkpoint/readers/gguf/gguf_blocks.h"

namespace marlin {
namespace {

constexpr std::string_view kMagic = "GGUF";
constexpr uint32_t kOldestVersion = 2;
constexpr uint32_t kNewestVersion = 3;
constexpr int64_t kMaxKeyBytes = 65535;
constexpr int64_t kMaxStringBytes = int64_t{1} << 30;
constexpr int64_t kMaxDims = 4;
constexpr int64_t kMaxValues = 65536;
constexpr int64_t kDefaultAlignment = 32;
constexpr int64_t kMaxAlignment = int64_t{1} << 20;

/// Bytes of a value of fixed size; 0 for strings and arrays, -1 for an unknown type.
int64_t FixedBytes(GgufType type) {
  switch (type) {
    case GgufType::kU8:
    case GgufType::kI8:
    case GgufType::kBool:
      return 1;
    case GgufType::kU16:
    case GgufType::kI16:
      return 2;
    case GgufType::kU32:
    case GgufType::kI32:
    case GgufType::kF32:
      return 4;
    case GgufType::kU64:
    case GgufType::kI64:
    case GgufType::kF64:
      return 8;
    case GgufType::kString:
    case GgufType::kArray:
      return 0;
  }
  return -1;
}

template <typename T>
T LoadAt(std::string_view bytes, int64_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * int64_t{sizeof(T)}, sizeof(T));
  return value;
}

std::optional<int64_t> IntegerAt(const GgufValue& value, int64_t i) {
  switch (value.type) {
    case GgufType::kU8:
      return LoadAt<uint8_t>(value.bytes, i);
    case GgufType::kI8:
      return LoadAt<int8_t>(value.bytes, i);
    case GgufType::kU16:
      return LoadAt<uint16_t>(value.bytes, i);
    case GgufType::kI16:
      return LoadAt<int16_t>(value.bytes, i);
    case GgufType::kU32:
      return LoadAt<uint32_t>(value.bytes, i);
    case GgufType::kI32:
      return LoadAt<int32_t>(value.bytes, i);
    case GgufType::kI64:
      return LoadAt<int64_t>(value.bytes, i);
    case GgufType::kU64:
      return Checked::FromUnsigned(LoadAt<uint64_t>(value.bytes, i)).Take();
    default:
      return std::nullopt;
  }
}

std::optional<double> RealAt(const GgufValue& value, int64_t i) {
  if (value.type == GgufType::kF32) return LoadAt<float>(value.bytes, i);
  if (value.type == GgufType::kF64) return LoadAt<double>(value.bytes, i);
  const std::optional<int64_t> integer = IntegerAt(value, i);
  if (!integer) return std::nullopt;
  return static_cast<double>(*integer);
}

/// All elements of a value, each read by `at`.
template <typename T, typename At>
std::optional<std::vector<T>> AllOf(const GgufValue* value, At at) {
  if (value == nullptr || FixedBytes(value->type) <= 0) return std::nullopt;
  std::vector<T> all;
  all.reserve(static_cast<size_t>(value->count));
  for (int64_t i = 0; i < value->count; ++i) {
    const std::optional<T> element = at(*value, i);
    if (!element) return std::nullopt;
    all.push_back(*element);
  }
  return all;
}

class GgufParser {
 public:
  GgufParser(std::string_view file, const std::string& where) : file_(file), where_(where) {}

  Result<GgufFile> Run() {
    MARLIN_RETURN_IF_ERROR(ReadHeader());
    for (int64_t i = 0; i < value_count_; ++i) MARLIN_RETURN_IF_ERROR(ReadPair());
    MARLIN_RETURN_IF_ERROR(ReadAlignment());
    for (int64_t i = 0; i < tensor_count_; ++i) MARLIN_RETURN_IF_ERROR(ReadTensor());
    MARLIN_RETURN_IF_ERROR(PlaceTensors());
    return std::move(out_);
  }

 private:
  Status Fail(const std::string& message) const {
    return Status(Code::kMalformedFile, fmt::format("{}: {}", Printable(where_), message));
  }

  int64_t Left() const { return static_cast<int64_t>(file_.size()) - at_; }

  Result<std::string_view> Take(int64_t bytes, std::string_view what) {
    if (bytes > Left()) {
      return Fail(
          fmt::format("{} at byte {}: {} bytes, the file has {} more", what, at_, bytes, Left()));
    }
    const std::string_view taken =
        file_.substr(static_cast<size_t>(at_), static_cast<size_t>(bytes));
    at_ += bytes;
    return taken;
  }

  template <typename T>
  Result<T> Number(std::string_view what) {
    MARLIN_ASSIGN_OR_RETURN(const std::string_view bytes, Take(sizeof(T), what));
    return LoadAt<T>(bytes, 0);
  }

  /// A count or size that the file stores in 64 bits.
  Result<int64_t> Count(std::string_view what, int64_t most) {
    const int64_t begin = at_;
    MARLIN_ASSIGN_OR_RETURN(const auto raw, Number<uint64_t>(what));
    if (raw > static_cast<uint64_t>(most)) {
      return Fail(fmt::format("{} at byte {}: {}, at most {} are read", what, begin, raw, most));
    }
    return static_cast<int64_t>(raw);
  }

  Result<std::string_view> String(std::string_view what, int64_t most) {
    MARLIN_ASSIGN_OR_RETURN(const int64_t bytes, Count(what, most));
    return Take(bytes, what);
  }

  Status ReadHeader() {
    MARLIN_ASSIGN_OR_RETURN(const std::string_view magic, Take(4, "magic"));
    if (magic != kMagic) return Fail("does not begin with GGUF");
    MARLIN_ASSIGN_OR_RETURN(const auto version, Number<uint32_t>("version"));
    if (version < kOldestVersion || version > kNewestVersion) {
      // A big-endian file has its version in the upper bytes.
      const bool swapped = (version & 0xffffu) == 0;
      return Status(
          Code::kUnsupported,
          fmt::format("{}: GGUF version {}{}, this build reads {} and {}", Printable(where_),
                      version, swapped ? " (the file is big-endian)" : "", kOldestVersion,
                      kNewestVersion));
    }
    MARLIN_ASSIGN_OR_RETURN(tensor_count_, Count("number of tensors", kMaxTensorCount));
    MARLIN_ASSIGN_OR_RETURN(value_count_, Count("number of metadata values", kMaxValues));
    return {};
  }

  Status ReadPair() {
    MARLIN_ASSIGN_OR_RETURN(const std::string_view key, String("metadata key", kMaxKeyBytes));
    GgufValue value;
    MARLIN_ASSIGN_OR_RETURN(value.type, Type(key));
    if (value.type == GgufType::kArray) {
      value.is_array = true;
      MARLIN_ASSIGN_OR_RETURN(value.type, Type(key));
      if (value.type == GgufType::kArray) {
        return Fail(fmt::format("metadata \"{}\": an array of arrays", Printable(key)));
      }
      MARLIN_ASSIGN_OR_RETURN(value.count, Count("number of array elements", kMaxStringBytes));
    }
    MARLIN_RETURN_IF_ERROR(TakeElements(key, &value));
    if (out_.metadata.Has(key)) {
      return Fail(fmt::format("metadata \"{}\" occurs twice", Printable(key)));
    }
    return out_.metadata.Add(key, value);
  }

  Result<GgufType> Type(std::string_view key) {
    MARLIN_ASSIGN_OR_RETURN(const auto raw, Number<uint32_t>("type of a metadata value"));
    const auto type = static_cast<GgufType>(raw);
    if (FixedBytes(type) < 0) {
      return Fail(fmt::format("metadata \"{}\": type {}, known are 0 to {}", Printable(key), raw,
                              static_cast<uint32_t>(GgufType::kF64)));
    }
    return type;
  }

  Status TakeElements(std::string_view key, GgufValue* value) {
    const int64_t begin = at_;
    const auto in_value = [&](const Status& status) {
      return status.ok() ? status
                         : Fail(fmt::format("metadata \"{}\": {} elements from byte {} pass the "
                                            "end of the file at {}",
                                            Printable(key), value->count, begin, file_.size()));
    };
    if (const int64_t bytes = FixedBytes(value->type); bytes > 0) {
      MARLIN_RETURN_IF_ERROR(in_value(Take(value->count * bytes, "value").status()));
    } else {
      for (int64_t i = 0; i < value->count; ++i) {
        MARLIN_RETURN_IF_ERROR(in_value(String("string", kMaxStringBytes).status()));
      }
    }
    value->bytes = file_.substr(static_cast<size_t>(begin), static_cast<size_t>(at_ - begin));
    return {};
  }

  Status ReadAlignment() {
    constexpr std::string_view kKey = "general.alignment";
    if (!out_.metadata.Has(kKey)) return {};
    const std::optional<int64_t> stored = out_.metadata.Integer(kKey);
    alignment_ = stored.value_or(0);
    if (alignment_ < 1 || alignment_ > kMaxAlignment ||
        !std::has_single_bit(static_cast<uint64_t>(alignment_))) {
      return Fail(fmt::format("metadata \"{}\": {} is not a power of two up to {}", kKey,
                              stored ? std::to_string(*stored) : "a value of another type",
                              kMaxAlignment));
    }
    return {};
  }

  Status ReadTensor() {
    GgufTensor tensor;
    MARLIN_ASSIGN_OR_RETURN(tensor.name, String("tensor name", kMaxNameBytes));
    const auto fail = [&](const std::string& message) {
      return Fail(fmt::format("tensor \"{}\": {}", Printable(tensor.name), message));
    };
    MARLIN_ASSIGN_OR_RETURN(const auto rank, Number<uint32_t>("number of dimensions"));
    if (rank > kMaxDims) return fail(fmt::format("{} dimensions, at most {}", rank, kMaxDims));
    // The file lists the contiguous dimension first.
    std::vector<int64_t> dims;
    for (uint32_t i = 0; i < rank; ++i) {
      MARLIN_ASSIGN_OR_RETURN(const int64_t dim, Count("dimension", INT64_MAX));
      dims.push_back(dim);
    }
    for (size_t i = dims.size(); i-- > 0;) tensor.dims.Append(dims[i]);
    MARLIN_ASSIGN_OR_RETURN(tensor.type, Number<uint32_t>("tensor type"));
    MARLIN_ASSIGN_OR_RETURN(tensor.offset, Count("tensor offset", INT64_MAX));
    const Result<GgufStored> stored = StoredAs(tensor.type);
    if (!stored.ok()) {
      return stored.status().WithContext(
          fmt::format("{}: tensor \"{}\"", Printable(where_), Printable(tensor.name)));
    }
    const int64_t row = dims.empty() ? 1 : dims.front();
    if (row % stored->elements != 0) {
      return fail(fmt::format("rows of {} elements are not whole blocks of {} ({})", row,
                              stored->elements, stored->name));
    }
    Checked bytes = Checked(row / stored->elements) * Checked(stored->bytes);
    for (size_t i = 1; i < dims.size(); ++i) bytes = bytes * Checked(dims[i]);
    const std::optional<int64_t> taken = bytes.Take();
    // A zero dimension hides the overflow of the others.
    Checked elements(1);
    for (const int64_t dim : dims) elements = elements * Checked(dim == 0 ? 1 : dim);
    if (!taken || !elements.valid()) {
      return fail(fmt::format("the size of {} overflows", tensor.dims.ToString()));
    }
    tensor.bytes = *taken;
    out_.tensors.push_back(tensor);
    return {};
  }

  /// Offsets must follow each other, padded to the alignment: no gaps and no overlap.
  Status PlaceTensors() {
    const auto size = static_cast<int64_t>(file_.size());
    out_.data_begin = RoundUp(at_, alignment_);
    Checked expected(0);
    for (GgufTensor& tensor : out_.tensors) {
      const auto fail = [&](const std::string& message) {
        return Fail(fmt::format("tensor \"{}\": {}", Printable(tensor.name), message));
      };
      const std::optional<int64_t> begin = expected.Take();
      if (!begin || tensor.offset != *begin) {
        return fail(fmt::format("offset {}, expected {}", tensor.offset, begin.value_or(-1)));
      }
      const std::optional<int64_t> end =
          (Checked(out_.data_begin) + Checked(tensor.offset) + Checked(tensor.bytes)).Take();
      if (!end || *end > size) {
        return fail(
            fmt::format("{} bytes at offset {} of the data at {} pass the end of the file "
                        "at {}",
                        tensor.bytes, tensor.offset, out_.data_begin, size));
      }
      expected =
          CeilDiv(expected + Checked(tensor.bytes), Checked(alignment_)) * Checked(alignment_);
      tensor.offset += out_.data_begin;
    }
    return {};
  }

  std::string_view file_;
  const std::string& where_;
  int64_t at_ = 0;
  int64_t tensor_count_ = 0;
  int64_t value_count_ = 0;
  int64_t alignment_ = kDefaultAlignment;
  GgufFile out_;
};

}  // namespace

Status GgufMetadata::Add(std::string_view key, const GgufValue& value) {
  if (values_.emplace(key, value).second) return {};
  return Status(Code::kMalformedFile, fmt::format("metadata \"{}\" occurs twice", Printable(key)));
}

const GgufValue* GgufMetadata::Find(std::string_view key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

std::vector<std::string_view> GgufMetadata::Keys(std::string_view prefix) const {
  std::vector<std::string_view> keys;
  for (auto at = values_.lower_bound(prefix); at != values_.end() && at->first.starts_with(prefix);
       ++at) {
    keys.push_back(at->first);
  }
  return keys;
}

std::optional<int64_t> GgufMetadata::Integer(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr || value->is_array) return std::nullopt;
  return IntegerAt(*value, 0);
}

std::optional<double> GgufMetadata::Real(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr || value->is_array) return std::nullopt;
  return RealAt(*value, 0);
}

std::optional<bool> GgufMetadata::Bool(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr || value->is_array || value->type != GgufType::kBool) return std::nullopt;
  return value->bytes.front() != 0;
}

std::optional<std::string_view> GgufMetadata::Text(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr || value->is_array || value->type != GgufType::kString) return std::nullopt;
  return value->bytes.substr(sizeof(uint64_t));
}

std::optional<std::vector<int64_t>> GgufMetadata::Integers(std::string_view key) const {
  return AllOf<int64_t>(Find(key), IntegerAt);
}

std::optional<std::vector<int64_t>> GgufMetadata::Flags(std::string_view key) const {
  const GgufValue* const value = Find(key);
  if (value == nullptr || !value->is_array || value->type != GgufType::kBool) return std::nullopt;
  return AllOf<int64_t>(value, [](const GgufValue& flags, int64_t i) {
    return std::optional<int64_t>(LoadAt<uint8_t>(flags.bytes, i) != 0 ? 1 : 0);
  });
}

std::optional<std::vector<double>> GgufMetadata::Reals(std::string_view key) const {
  return AllOf<double>(Find(key), RealAt);
}

std::optional<std::vector<std::string_view>> GgufMetadata::Texts(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr || value->type != GgufType::kString) return std::nullopt;
  std::vector<std::string_view> texts;
  texts.reserve(static_cast<size_t>(value->count));
  std::string_view rest = value->bytes;
  for (int64_t i = 0; i < value->count; ++i) {
    const auto bytes = static_cast<size_t>(LoadAt<uint64_t>(rest, 0));
    texts.push_back(rest.substr(sizeof(uint64_t), bytes));
    rest.remove_prefix(sizeof(uint64_t) + bytes);
  }
  return texts;
}

double Shortest(double value) { return std::stod(fmt::format("{}", static_cast<float>(value))); }

Result<GgufFile> ParseGguf(std::string_view file, const std::string& where) {
  return GgufParser(file, where).Run();
}

}  // namespace marlin
