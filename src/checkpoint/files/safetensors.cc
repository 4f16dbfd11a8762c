#include "checkpoint/files/safetensors.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/checked.h"
#include "base/json.h"
#include "base/macros.h"
#include "checkpoint/files/io.h"

namespace marlin {
namespace {

// In the order of DType.
constexpr std::array<std::string_view, 16> kDTypeNames = {
    "BOOL", "U8",   "I8",  "F8_E4M3", "F8_E5M2", "F8_E8M0", "I16", "U16",
    "F16",  "BF16", "I32", "U32",     "F32",     "I64",     "U64", "F64"};
// Element types of the format that this library does not support.
constexpr std::array<std::string_view, 6> kUnsupportedDTypes = {
    "F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64"};

constexpr int64_t kLengthBytes = 8;

std::optional<DType> FindDType(std::string_view name) {
  const auto it = std::find(kDTypeNames.begin(), kDTypeNames.end(), name);
  if (it == kDTypeNames.end()) return std::nullopt;
  return static_cast<DType>(it - kDTypeNames.begin());
}

// Receives the header's JSON as SAX events, so that no document is built and anything outside the
// schema stops the parse at once.
class HeaderHandler : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderHandler(SafetensorsHeader* header) : header_(header) {}

  const Status& status() const { return status_; }

  bool null() override {
    // MLX writes null where a file has no metadata.
    if (state_ != State::kMetadataValue) return Unexpected("null");
    state_ = State::kRoot;
    return true;
  }
  bool boolean(bool /*value*/) override { return Unexpected("a boolean"); }
  bool number_integer(number_integer_t value) override {
    return Unexpected(fmt::format("the negative number {}", value));
  }
  bool number_float(number_float_t /*value*/, const string_t& text) override {
    return Unexpected("the number " + Printable(text));
  }
  bool binary(binary_t& /*value*/) override { return Unexpected("binary"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (state_ == State::kShape) return AppendDimension(value);
    if (state_ == State::kOffsets) return AppendOffset(value);
    return Unexpected(fmt::format("the number {}", value));
  }

  bool string(string_t& value) override {
    if (state_ == State::kMetadata) {
      if (!header_->metadata.emplace(key_, value).second) {
        return Fail(fmt::format("__metadata__: duplicate key \"{}\"", Printable(key_)));
      }
      return true;
    }
    if (state_ == State::kEntry && field_ == Field::kDType) return SetDType(value);
    return Unexpected("the string \"" + Printable(value) + "\"");
  }

  bool start_object(size_t /*count*/) override {
    if (state_ == State::kStart) {
      state_ = State::kRoot;
      return true;
    }
    if (state_ == State::kMetadataValue) {
      state_ = State::kMetadata;
      return true;
    }
    if (state_ == State::kEntryValue) return StartEntry();
    return Unexpected("an object");
  }

  bool end_object() override {
    if (state_ == State::kEntry) return EndEntry();
    state_ = state_ == State::kMetadata ? State::kRoot : State::kDone;
    return true;
  }

  bool start_array(size_t /*count*/) override {
    if (state_ == State::kEntry && field_ == Field::kShape) {
      state_ = State::kShape;
      return true;
    }
    if (state_ == State::kEntry && field_ == Field::kOffsets) {
      state_ = State::kOffsets;
      return true;
    }
    return Unexpected("an array");
  }

  bool end_array() override {
    if (state_ == State::kOffsets && offset_count_ != 2) {
      return FailTensor(fmt::format("data_offsets: expected 2 numbers, got {}", offset_count_));
    }
    state_ = State::kEntry;
    return true;
  }

  bool key(string_t& value) override {
    if (state_ == State::kRoot) return RootKey(value);
    if (state_ == State::kEntry) return EntryKey(value);
    key_ = value;  // kMetadata
    return true;
  }

  bool parse_error(size_t /*position*/, const std::string& /*token*/,
                   const Json::exception& error) override {
    return Fail("header: " + JsonErrorText(error.what()));
  }

 private:
  enum class State : uint8_t {
    kStart,
    kRoot,
    kMetadataValue,
    kMetadata,
    kEntryValue,
    kEntry,
    kShape,
    kOffsets,
    kDone,
  };
  enum class Field : uint8_t { kNone, kDType, kShape, kOffsets };

  bool Fail(std::string_view message, Code code = Code::kMalformedFile) {
    if (status_.ok()) status_ = Status(code, message);
    return false;
  }
  bool FailTensor(const std::string& message, Code code = Code::kMalformedFile) {
    return Fail(fmt::format("tensor \"{}\": {}", Printable(entry_.name), message), code);
  }
  bool Unexpected(const std::string& what) {
    switch (state_) {
      case State::kStart:
      case State::kDone:
      case State::kRoot:
        return Fail("header: expected an object, got " + what);
      case State::kMetadataValue:
        return Fail("__metadata__: expected an object, got " + what);
      case State::kMetadata:
        return Fail(
            fmt::format("__metadata__: \"{}\": expected a string, got {}", Printable(key_), what));
      case State::kEntryValue:
        return FailTensor("expected an object, got " + what);
      case State::kShape:
        return FailTensor("shape: expected non-negative integers, got " + what);
      case State::kOffsets:
        return FailTensor("data_offsets: expected non-negative integers, got " + what);
      case State::kEntry:
        break;
    }
    return FailTensor(fmt::format("{}: got {}", FieldName(field_), what));
  }
  static std::string_view FieldName(Field field) {
    constexpr std::array<std::string_view, 4> kNames = {"entry", "dtype", "shape", "data_offsets"};
    return kNames[static_cast<size_t>(field)];
  }

  bool RootKey(const std::string& name) {
    if (name == "__metadata__") {
      if (has_metadata_) return Fail("duplicate key \"__metadata__\"");
      has_metadata_ = true;
      state_ = State::kMetadataValue;
      return true;
    }
    if (static_cast<int64_t>(name.size()) > kMaxNameBytes) {
      return Fail(fmt::format("tensor name of {} bytes, at most {} are accepted", name.size(),
                              kMaxNameBytes));
    }
    if (static_cast<int64_t>(header_->tensors.size()) >= kMaxTensorCount) {
      return Fail(fmt::format("more than {} tensors", kMaxTensorCount));
    }
    entry_ = TensorInfo{};
    entry_.name = name;
    state_ = State::kEntryValue;
    return true;
  }

  bool StartEntry() {
    state_ = State::kEntry;
    field_ = Field::kNone;
    seen_ = {};
    offset_count_ = 0;
    return true;
  }

  bool EntryKey(const std::string& name) {
    field_ = Field::kNone;
    for (const Field field : {Field::kDType, Field::kShape, Field::kOffsets}) {
      if (name == FieldName(field)) field_ = field;
    }
    if (field_ == Field::kNone) {
      return FailTensor(fmt::format("unknown key \"{}\"", Printable(name)));
    }
    bool& seen = seen_[static_cast<size_t>(field_)];
    if (seen) return FailTensor(fmt::format("duplicate key \"{}\"", name));
    seen = true;
    return true;
  }

  bool SetDType(const std::string& name) {
    if (const std::optional<DType> dtype = FindDType(name)) {
      entry_.dtype = *dtype;
      return true;
    }
    if (std::find(kUnsupportedDTypes.begin(), kUnsupportedDTypes.end(), name) !=
        kUnsupportedDTypes.end()) {
      return FailTensor(fmt::format("dtype {} is not supported", name), Code::kUnsupported);
    }
    return FailTensor(fmt::format("unknown dtype \"{}\"", Printable(name)));
  }

  bool AppendDimension(uint64_t value) {
    if (entry_.shape.rank() >= kMaxRank) {
      return FailTensor(fmt::format("shape: more than {} dimensions", kMaxRank));
    }
    const std::optional<int64_t> dim = Checked::FromUnsigned(value).Take();
    if (!dim) return FailTensor(fmt::format("shape: dimension {} is too large", value));
    entry_.shape.Append(*dim);
    return true;
  }

  bool AppendOffset(uint64_t value) {
    if (offset_count_ >= 2) return FailTensor("data_offsets: more than 2 numbers");
    const std::optional<int64_t> offset = Checked::FromUnsigned(value).Take();
    if (!offset) return FailTensor(fmt::format("data_offsets: {} is too large", value));
    offsets_[offset_count_++] = *offset;
    return true;
  }

  bool EndEntry() {
    for (const Field field : {Field::kDType, Field::kShape, Field::kOffsets}) {
      if (!seen_[static_cast<size_t>(field)]) {
        return FailTensor(fmt::format("no {}", FieldName(field)));
      }
    }
    if (offsets_[0] > offsets_[1]) {
      return FailTensor(fmt::format("data_offsets [{}, {}]: the end comes before the begin",
                                    offsets_[0], offsets_[1]));
    }
    // Zero dimensions are excluded from the product, so that no prefix of an accepted shape's
    // dimensions overflows in ElementCount().
    Checked bytes(DTypeBytes(entry_.dtype));
    bool zero = false;
    for (int i = 0; i < entry_.shape.rank(); ++i) {
      zero = zero || entry_.shape[i] == 0;
      bytes = bytes * Checked(std::max<int64_t>(entry_.shape[i], 1));
    }
    const std::optional<int64_t> nonzero = bytes.Take();
    if (!nonzero) {
      return FailTensor(fmt::format("shape {} overflows", entry_.shape.ToString()));
    }
    const int64_t needed = zero ? 0 : *nonzero;
    entry_.offset = offsets_[0];
    entry_.bytes = offsets_[1] - offsets_[0];
    if (needed != entry_.bytes) {
      return FailTensor(fmt::format("{} {} needs {} bytes, data_offsets [{}, {}] hold {}",
                                    DTypeName(entry_.dtype), entry_.shape.ToString(), needed,
                                    offsets_[0], offsets_[1], entry_.bytes));
    }
    header_->tensors.push_back(std::move(entry_));
    state_ = State::kRoot;
    return true;
  }

  SafetensorsHeader* header_;
  Status status_;
  State state_ = State::kStart;
  Field field_ = Field::kNone;
  std::array<bool, 4> seen_{};
  std::array<int64_t, 2> offsets_{};
  size_t offset_count_ = 0;
  bool has_metadata_ = false;
  std::string key_;
  TensorInfo entry_;
};

// Checks that every data byte belongs to exactly one tensor. Offsets still count from the data.
Status CheckExtents(const std::vector<TensorInfo>& tensors, int64_t data_bytes) {
  std::vector<const TensorInfo*> order;
  order.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const TensorInfo* a, const TensorInfo* b) {
    if (a->offset != b->offset) return a->offset < b->offset;
    return a->bytes != b->bytes ? a->bytes < b->bytes : a->name < b->name;
  });
  int64_t end = 0;
  for (const TensorInfo* tensor : order) {
    const auto extent = [tensor] {
      return fmt::format("tensor \"{}\": data_offsets [{}, {}]", Printable(tensor->name),
                         tensor->offset, tensor->offset + tensor->bytes);
    };
    if (tensor->offset + tensor->bytes > data_bytes) {
      return Status(Code::kMalformedFile,
                    fmt::format("{} pass the end of the data, {} bytes", extent(), data_bytes));
    }
    if (tensor->offset < end) {
      return Status(Code::kMalformedFile,
                    fmt::format("{} overlap the tensor before, which ends at {}", extent(), end));
    }
    if (tensor->offset > end) {
      return Status(Code::kMalformedFile, fmt::format("{} leave a hole after {}", extent(), end));
    }
    end = tensor->offset + tensor->bytes;
  }
  if (end != data_bytes) {
    return Status(Code::kMalformedFile,
                  fmt::format("the tensors end at {}, the data at {}", end, data_bytes));
  }
  return {};
}

Result<std::string_view> FindHeaderText(std::span<const std::byte> image) {
  const auto malformed = [](std::string_view message) {
    return Status(Code::kMalformedFile, message);
  };
  const auto file_bytes = static_cast<int64_t>(image.size());
  if (file_bytes < kLengthBytes) {
    return malformed(
        fmt::format("{} bytes, a safetensors file has at least {}", file_bytes, kLengthBytes));
  }
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) length = length << 8 | static_cast<uint64_t>(image[i]);
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    if (image.front() == std::byte{'{'}) {
      return malformed("no safetensors file: it begins with '{', as JSON does");
    }
    return malformed(
        fmt::format("header of {} bytes, at most {} are accepted", length, kMaxHeaderBytes));
  }
  if (length > static_cast<uint64_t>(file_bytes - kLengthBytes)) {
    return malformed(fmt::format("header of {} bytes, the file has {} after the length", length,
                                 file_bytes - kLengthBytes));
  }
  const std::string_view text(reinterpret_cast<const char*>(image.data()) + kLengthBytes, length);
  if (text.empty() || text.front() != '{') return malformed("the header does not begin with '{'");
  const size_t last = text.find_last_not_of(' ');
  if (text[last] != '}') return malformed("the header does not end with '}' and spaces");
  return text;
}

Result<SafetensorsHeader> Parse(std::span<const std::byte> image, const std::string& file) {
  MARLIN_ASSIGN_OR_RETURN(const std::string_view text, FindHeaderText(image));
  SafetensorsHeader header;
  HeaderHandler handler(&header);
  if (!Json::sax_parse(text, &handler)) {
    if (!handler.status().ok()) return handler.status();
    return Status(Code::kMalformedFile, "header: broken JSON");
  }
  header.data_begin = kLengthBytes + static_cast<int64_t>(text.size());
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  for (size_t i = 1; i < header.tensors.size(); ++i) {
    if (header.tensors[i].name == header.tensors[i - 1].name) {
      return Status(Code::kMalformedFile,
                    fmt::format("duplicate key \"{}\"", Printable(header.tensors[i].name)));
    }
  }
  MARLIN_RETURN_IF_ERROR(
      CheckExtents(header.tensors, static_cast<int64_t>(image.size()) - header.data_begin));
  for (TensorInfo& tensor : header.tensors) {
    tensor.file = file;
    tensor.offset += header.data_begin;
  }
  return header;
}

}  // namespace

Result<SafetensorsHeader> ParseSafetensors(std::span<const std::byte> image,
                                           const std::string& path, const std::string& file) {
  try {
    Result<SafetensorsHeader> header = Parse(image, file);
    if (!header.ok()) return header.status().WithContext(Printable(path));
    return header;
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, Printable(path) + ": no memory for its header");
  }
}

std::string_view SafetensorsDTypeName(DType dtype) {
  return kDTypeNames[static_cast<size_t>(dtype)];
}

std::string BuildSafetensorsHeader(std::span<const SafetensorsEntry> entries,
                                   const std::map<std::string, std::string>& metadata) {
  std::string json = "{";
  if (!metadata.empty()) json += "\"__metadata__\":" + Json(metadata).dump();
  for (const SafetensorsEntry& entry : entries) {
    if (json.size() > 1) json += ",";
    std::string dims;
    for (int i = 0; i < entry.shape.rank(); ++i) {
      if (i > 0) dims += ',';
      dims += std::to_string(entry.shape[i]);
    }
    json += fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                        Json(entry.name).dump(), SafetensorsDTypeName(entry.dtype), dims,
                        entry.begin, entry.begin + entry.bytes);
  }
  json += "}";
  const auto size = static_cast<int64_t>(json.size());
  json.append(
      static_cast<size_t>(RoundUp(size + kLengthBytes, kDataAlignment) - kLengthBytes - size), ' ');
  std::string header;
  for (uint64_t i = 0, length = json.size(); i < 8; ++i, length >>= 8) {
    header += static_cast<char>(length & 0xff);
  }
  return header + json;
}

}  // namespace marlin
