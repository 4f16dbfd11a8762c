#include "checkpoint/writers/gguf_metadata.h"

namespace marlin {

void AppendGgufText(std::string_view text, std::string* out) {
  AppendGgufNumber<uint64_t>(text.size(), out);
  out->append(text);
}

void AppendGgufStart(size_t tensors, int64_t values, std::string* out) {
  constexpr uint32_t kVersion = 3;
  out->append("GGUF");
  AppendGgufNumber(kVersion, out);
  AppendGgufNumber(static_cast<uint64_t>(tensors), out);
  AppendGgufNumber(static_cast<uint64_t>(values), out);
}

std::string GgufMetadataBuilder::Header() const {
  std::string file;
  AppendGgufStart(0, count_, &file);
  return file + bytes_;
}

void GgufMetadataBuilder::Key(std::string_view key, GgufType type) {
  ++count_;
  AppendGgufText(key, &bytes_);
  AppendGgufNumber(static_cast<uint32_t>(type), &bytes_);
}

void GgufMetadataBuilder::Array(std::string_view key, GgufType type, size_t count) {
  Key(key, GgufType::kArray);
  AppendGgufNumber(static_cast<uint32_t>(type), &bytes_);
  AppendGgufNumber<uint64_t>(count, &bytes_);
}

void GgufMetadataBuilder::Text(std::string_view key, std::string_view value) {
  Key(key, GgufType::kString);
  AppendGgufText(value, &bytes_);
}

void GgufMetadataBuilder::Count(std::string_view key, int64_t value) {
  Key(key, GgufType::kU32);
  AppendGgufNumber(static_cast<uint32_t>(value), &bytes_);
}

void GgufMetadataBuilder::Real(std::string_view key, double value) {
  Key(key, GgufType::kF32);
  AppendGgufNumber(static_cast<float>(value), &bytes_);
}

void GgufMetadataBuilder::Flag(std::string_view key, bool value) {
  Key(key, GgufType::kBool);
  AppendGgufNumber(static_cast<uint8_t>(value), &bytes_);
}

void GgufMetadataBuilder::Texts(std::string_view key, std::span<const std::string> values) {
  Array(key, GgufType::kString, values.size());
  for (const std::string& value : values) AppendGgufText(value, &bytes_);
}

void GgufMetadataBuilder::Integers(std::string_view key, std::span<const int32_t> values) {
  Array(key, GgufType::kI32, values.size());
  for (const int32_t value : values) AppendGgufNumber(value, &bytes_);
}

void GgufMetadataBuilder::Reals(std::string_view key, std::span<const float> values) {
  Array(key, GgufType::kF32, values.size());
  for (const float value : values) AppendGgufNumber(value, &bytes_);
}

void GgufMetadataBuilder::Flags(std::string_view key, const std::vector<bool>& values) {
  Array(key, GgufType::kBool, values.size());
  for (const bool value : values) AppendGgufNumber(static_cast<uint8_t>(value), &bytes_);
}

void GgufMetadataBuilder::Split(uint16_t number, uint16_t count, int32_t tensors) {
  Key("split.no", GgufType::kU16);
  AppendGgufNumber(number, &bytes_);
  Key("split.count", GgufType::kU16);
  AppendGgufNumber(count, &bytes_);
  Key("split.tensors.count", GgufType::kI32);
  AppendGgufNumber(tensors, &bytes_);
}

}  // namespace marlin
