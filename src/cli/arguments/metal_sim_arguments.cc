#include "cli/arguments/metal_sim_arguments.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <utility>

#include "base/errors.h"
#include "base/macros.h"
#include "base/parse_number.h"
#include "base/read_file.h"
#include "base/scalars.h"

namespace marlin::cli {
namespace {

struct ScalarRow {
  std::string_view name;
  MetalScalar type;
  int64_t bytes;
};
constexpr ScalarRow kScalars[] = {
    {"float", MetalScalar::kFloat, 4},   {"half", MetalScalar::kHalf, 2},
    {"bfloat", MetalScalar::kBfloat, 2}, {"int", MetalScalar::kInt, 4},
    {"uint", MetalScalar::kUint, 4},     {"short", MetalScalar::kShort, 2},
    {"ushort", MetalScalar::kUshort, 2}, {"char", MetalScalar::kChar, 1},
    {"uchar", MetalScalar::kUchar, 1},   {"long", MetalScalar::kLong, 8},
    {"ulong", MetalScalar::kUlong, 8},   {"bool", MetalScalar::kBool, 1},
};

Status Wrong(const char* option, const std::string& text, const std::string& expected) {
  return Invalid(fmt::format("{}: expected {}, got '{}'", option, expected, text));
}

template <typename T>
std::vector<uint8_t> BytesOf(const T& value) {
  std::vector<uint8_t> bytes(sizeof(T));
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

template <typename T>
T ValueOf(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

bool IsFloating(MetalScalar type) {
  return type == MetalScalar::kFloat || type == MetalScalar::kHalf || type == MetalScalar::kBfloat;
}

std::vector<uint8_t> EncodeFloating(MetalScalar type, float value) {
  if (type == MetalScalar::kHalf) return BytesOf(FloatToHalf(value));
  if (type == MetalScalar::kBfloat) return BytesOf(FloatToBf16(value));
  return BytesOf(value);
}

/// Encodes an integer that fits the type, signed or not: little-endian.
std::vector<uint8_t> EncodeInteger(MetalScalar type, int64_t value) {
  std::vector<uint8_t> bytes = BytesOf(value);
  bytes.resize(static_cast<size_t>(MetalScalarBytes(type)));
  return bytes;
}

/// The indices of arguments and, as they are 16 bits, of function constants.
constexpr int kMostArgument = 30;
constexpr int kMostConstant = 65535;

/// Splits "INDEX=REST".
Status SplitIndex(const char* option, const std::string& text, int* index, std::string* rest,
                  int most = kMostArgument) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos ||
      !ParseNumber(std::string_view(text).substr(0, equals), index) || *index < 0 ||
      *index > most) {
    return Wrong(option, text, fmt::format("INDEX=... with an index from 0 to {}", most));
  }
  *rest = text.substr(equals + 1);
  return Status();
}

std::vector<std::string> SplitAt(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back().push_back(c);
    }
  }
  return parts;
}

/// Encodes "TYPE:V,V,..." as consecutive bytes.
Result<std::vector<uint8_t>> ParseValues(const char* option, const std::string& text) {
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return Wrong(option, text, "TYPE:VALUE");
  MARLIN_ASSIGN_OR_RETURN(const MetalScalar type, ParseMetalScalar(text.substr(0, colon)));
  std::vector<uint8_t> bytes;
  for (const std::string& word : SplitAt(text.substr(colon + 1), ',')) {
    const Result<std::vector<uint8_t>> value = EncodeMetalScalar(type, word);
    if (!value.ok()) return value.status().WithContext(option);
    bytes.insert(bytes.end(), value->begin(), value->end());
  }
  return bytes;
}

Result<metal_sim::Size3> ParseSize(const char* option, const std::string& text) {
  const std::vector<std::string> words = SplitAt(text, ',');
  metal_sim::Size3 size;
  uint32_t* const fields[] = {&size.x, &size.y, &size.z};
  if (words.size() > std::size(fields)) return Wrong(option, text, "X, X,Y or X,Y,Z");
  for (size_t i = 0; i < words.size(); ++i) {
    if (!ParseNumber(words[i], fields[i]) || *fields[i] == 0) {
      return Wrong(option, text, "X, X,Y or X,Y,Z, all from 1 up");
    }
  }
  return size;
}

/// Sets a buffer's initial content.
Status Fill(const std::string& content, MetalBuffer* buffer, int64_t count) {
  if (content == "none") buffer->initialised = false;
  std::mt19937 bits(1);
  std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
  for (int64_t i = 0; i < count; ++i) {
    std::vector<uint8_t> value;
    if (content == "zeros" || content == "none") {
      value.resize(static_cast<size_t>(MetalScalarBytes(buffer->type)));
    } else if (content == "ones" || content == "iota") {
      const int64_t number = content == "ones" ? 1 : i;
      value = IsFloating(buffer->type) ? EncodeFloating(buffer->type, static_cast<float>(number))
                                       : EncodeInteger(buffer->type, number);
    } else if (content == "random") {
      value = IsFloating(buffer->type) ? EncodeFloating(buffer->type, uniform(bits))
                                       : EncodeInteger(buffer->type, static_cast<int64_t>(bits()));
    } else {
      return Wrong("--buffer", content, "zeros, ones, iota, random or none");
    }
    buffer->bytes.insert(buffer->bytes.end(), value.begin(), value.end());
  }
  return Status();
}

Status ReadWhole(const std::string& path, std::vector<uint8_t>* bytes) {
  MARLIN_ASSIGN_OR_RETURN(const std::string content, ReadFile(path, kMaxTextBytes));
  bytes->assign(content.begin(), content.end());
  return Status();
}

}  // namespace

Result<MetalScalar> ParseMetalScalar(std::string_view name) {
  std::vector<std::string_view> names;
  for (const ScalarRow& row : kScalars) {
    if (row.name == name) return row.type;
    names.push_back(row.name);
  }
  return Invalid(fmt::format("type: expected one of {}, got '{}'", fmt::join(names, ", "), name));
}

int64_t MetalScalarBytes(MetalScalar type) {
  for (const ScalarRow& row : kScalars) {
    if (row.type == type) return row.bytes;
  }
  return 0;
}

Result<std::vector<uint8_t>> EncodeMetalScalar(MetalScalar type, const std::string& text) {
  if (IsFloating(type)) {
    float value = 0;
    if (!ParseNumber(text, &value)) return Wrong("value", text, "a number");
    return EncodeFloating(type, value);
  }
  if (type == MetalScalar::kBool) {
    if (text != "true" && text != "false") return Wrong("value", text, "true or false");
    return std::vector<uint8_t>{text == "true" ? uint8_t{1} : uint8_t{0}};
  }
  if (type == MetalScalar::kUlong) {
    uint64_t value = 0;
    if (!ParseNumber(text, &value)) return Wrong("value", text, "a whole number from 0 up");
    return BytesOf(value);
  }
  int64_t value = 0;
  const bool is_signed = type == MetalScalar::kInt || type == MetalScalar::kShort ||
                         type == MetalScalar::kChar || type == MetalScalar::kLong;
  const int64_t bits = MetalScalarBytes(type) * 8;
  const int64_t largest = bits == 64 ? std::numeric_limits<int64_t>::max()
                                     : (int64_t{1} << (is_signed ? bits - 1 : bits)) - 1;
  const int64_t smallest = is_signed ? -largest - 1 : 0;
  if (!ParseNumber(text, &value) || value < smallest || value > largest) {
    return Wrong("value", text, fmt::format("a whole number from {} to {}", smallest, largest));
  }
  return EncodeInteger(type, value);
}

std::string FormatMetalScalar(MetalScalar type, const uint8_t* bytes) {
  switch (type) {
    case MetalScalar::kFloat:
      return fmt::format("{}", ValueOf<float>(bytes));
    case MetalScalar::kHalf:
      return fmt::format("{}", HalfToFloat(ValueOf<uint16_t>(bytes)));
    case MetalScalar::kBfloat:
      return fmt::format("{}", Bf16ToFloat(ValueOf<uint16_t>(bytes)));
    case MetalScalar::kInt:
      return fmt::format("{}", ValueOf<int32_t>(bytes));
    case MetalScalar::kUint:
      return fmt::format("{}", ValueOf<uint32_t>(bytes));
    case MetalScalar::kShort:
      return fmt::format("{}", ValueOf<int16_t>(bytes));
    case MetalScalar::kUshort:
      return fmt::format("{}", ValueOf<uint16_t>(bytes));
    case MetalScalar::kChar:
      return fmt::format("{}", int{ValueOf<int8_t>(bytes)});
    case MetalScalar::kUchar:
      return fmt::format("{}", int{ValueOf<uint8_t>(bytes)});
    case MetalScalar::kLong:
      return fmt::format("{}", ValueOf<int64_t>(bytes));
    case MetalScalar::kUlong:
      return fmt::format("{}", ValueOf<uint64_t>(bytes));
    case MetalScalar::kBool:
      return bytes[0] != 0 ? "true" : "false";
  }
  return {};
}

void MetalLaunchArguments::Declare(ArgumentList& arguments) {
  arguments.Option("--grid", &grid_, "X,Y,Z", "Threadgroups");
  arguments.Option("--grid-threads", &grid_threads_, "X,Y,Z",
                   "Total threads instead; threadgroups at the edges may be smaller");
  arguments.Option("--threads", &threads_, "X,Y,Z", "Threads per threadgroup");
  arguments.Option("--buffer", &buffer_texts_, "INDEX=TYPE:COUNT[:CONTENT]",
                   "Content: zeros, ones, iota, random, none; or INDEX=TYPE:@FILE");
  arguments.Option("--value", &value_texts_, "INDEX=TYPE:V,V", "Bytes of a constant argument");
  arguments.Option("--constant", &constant_texts_, "INDEX=TYPE:V", "A function constant");
  arguments.Option("--threadgroup-memory", &memory_texts_, "INDEX=BYTES",
                   "Size of a threadgroup argument");
  arguments.Option("--output", &output_texts_, "INDEX=FILE", "Writes a buffer's bytes");
  arguments.Option("--print", &print_texts_, "INDEX", "Prints the first elements of a buffer");
}

Status MetalLaunchArguments::ReadSizes() {
  const std::string& grid = grid_threads_ ? *grid_threads_ : grid_;
  MARLIN_ASSIGN_OR_RETURN(grid_size_, ParseSize(grid_threads_ ? "--grid-threads" : "--grid", grid));
  MARLIN_ASSIGN_OR_RETURN(threads_size_, ParseSize("--threads", threads_));
  return Status();
}

Status MetalLaunchArguments::ReadBuffer(const std::string& text) {
  int index = 0;
  std::string rest;
  MARLIN_RETURN_IF_ERROR(SplitIndex("--buffer", text, &index, &rest));
  const std::vector<std::string> parts = SplitAt(rest, ':');
  if (parts.size() < 2 || parts.size() > 3) {
    return Wrong("--buffer", text, "INDEX=TYPE:COUNT[:CONTENT] or INDEX=TYPE:@FILE");
  }
  MetalBuffer buffer;
  MARLIN_ASSIGN_OR_RETURN(buffer.type, ParseMetalScalar(parts[0]));
  if (parts[1].starts_with('@')) {
    MARLIN_RETURN_IF_ERROR(ReadWhole(parts[1].substr(1), &buffer.bytes));
  } else {
    int64_t count = 0;
    constexpr int64_t kMostElements = int64_t{1} << 28;
    if (!ParseNumber(parts[1], &count) || count < 1 || count > kMostElements) {
      return Wrong("--buffer", text, "a count from 1 to 2^28");
    }
    MARLIN_RETURN_IF_ERROR(Fill(parts.size() == 3 ? parts[2] : "zeros", &buffer, count));
  }
  buffers_[index] = std::move(buffer);
  return Status();
}

Status MetalLaunchArguments::Read() {
  MARLIN_RETURN_IF_ERROR(ReadSizes());
  for (const std::string& text : buffer_texts_) MARLIN_RETURN_IF_ERROR(ReadBuffer(text));
  int index = 0;
  std::string rest;
  for (const std::string& text : value_texts_) {
    MARLIN_RETURN_IF_ERROR(SplitIndex("--value", text, &index, &rest));
    MARLIN_ASSIGN_OR_RETURN(values_[index], ParseValues("--value", rest));
  }
  for (const std::string& text : constant_texts_) {
    MARLIN_RETURN_IF_ERROR(SplitIndex("--constant", text, &index, &rest, kMostConstant));
    MARLIN_ASSIGN_OR_RETURN(constants_[index], ParseValues("--constant", rest));
  }
  for (const std::string& text : memory_texts_) {
    MARLIN_RETURN_IF_ERROR(SplitIndex("--threadgroup-memory", text, &index, &rest));
    if (!ParseNumber(rest, &memory_[index]) || memory_[index] < 1) {
      return Wrong("--threadgroup-memory", text, "INDEX=BYTES");
    }
  }
  for (const std::string& text : output_texts_) {
    MARLIN_RETURN_IF_ERROR(SplitIndex("--output", text, &index, &rest));
    if (!buffers_.contains(index)) return Wrong("--output", text, "the index of a --buffer");
    outputs_[index] = rest;
  }
  return Printed().status();
}

Result<std::vector<int>> MetalLaunchArguments::Printed() const {
  std::vector<int> indices;
  for (const std::string& text : print_texts_) {
    int index = 0;
    if (!ParseNumber(text, &index) || !buffers_.contains(index)) {
      return Wrong("--print", text, "the index of a --buffer");
    }
    indices.push_back(index);
  }
  return indices;
}

metal_sim::Launch MetalLaunchArguments::MakeLaunch() {
  metal_sim::Launch launch;
  launch.grid = grid_size_;
  launch.threads_per_threadgroup = threads_size_;
  launch.grid_counts_threads = grid_threads_.has_value();
  for (auto& [index, buffer] : buffers_) {
    metal_sim::BufferBinding& binding = launch.buffers[index];
    binding.data = buffer.bytes.data();
    binding.bytes = static_cast<int64_t>(buffer.bytes.size());
    binding.initialised = buffer.initialised;
    binding.name = fmt::format("buffer({})", index);
  }
  launch.values = values_;
  launch.threadgroup_memory = memory_;
  return launch;
}

Status MetalLaunchArguments::WriteOutputs() const {
  for (const auto& [index, path] : outputs_) {
    const std::vector<uint8_t>& bytes = buffers_.at(index).bytes;
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    file.close();
    if (!file) return Status(Code::kIo, path + ": cannot be written");
  }
  return Status();
}

}  // namespace marlin::cli
