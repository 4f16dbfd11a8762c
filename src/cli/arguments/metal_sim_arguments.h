// The launch arguments of metal-sim, parsed from text: sizes, buffers, values and constants.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "cli/arguments/arguments.h"
#include "marlin/status.h"
#include "metal_sim/launch.h"

namespace marlin::cli {

/// A scalar type of Metal.
enum class MetalScalar : uint8_t {
  kFloat,
  kHalf,
  kBfloat,
  kInt,
  kUint,
  kShort,
  kUshort,
  kChar,
  kUchar,
  kLong,
  kUlong,
  kBool
};

/// Errors: kInvalidArgument, listing the names.
Result<MetalScalar> ParseMetalScalar(std::string_view name);
int64_t MetalScalarBytes(MetalScalar type);
/// Encodes a number. Errors: kInvalidArgument for text that is not a number of the type.
Result<std::vector<uint8_t>> EncodeMetalScalar(MetalScalar type, const std::string& text);
std::string FormatMetalScalar(MetalScalar type, const uint8_t* bytes);

/// A buffer of the command line, with its memory.
struct MetalBuffer {
  MetalScalar type = MetalScalar::kFloat;
  std::vector<uint8_t> bytes;
  bool initialised = true;
};

/// The options that describe a launch.
class MetalLaunchArguments {
 public:
  void Declare(ArgumentList& arguments);
  /// Parses the options. Errors: kInvalidArgument naming the option and its text, kIo.
  Status Read();

  /// The launch, bound to the buffers' memory, which receives its results.
  metal_sim::Launch MakeLaunch();
  const std::map<int, MetalBuffer>& buffers() const { return buffers_; }
  const std::map<int, std::vector<uint8_t>>& constants() const { return constants_; }
  /// Errors: kIo.
  Status WriteOutputs() const;
  /// The buffers of --print, in the given order. Errors: kInvalidArgument.
  Result<std::vector<int>> Printed() const;

 private:
  Status ReadSizes();
  Status ReadBuffer(const std::string& text);

  std::string grid_ = "1";
  std::optional<std::string> grid_threads_;
  std::string threads_ = "32";
  std::vector<std::string> buffer_texts_;
  std::vector<std::string> value_texts_;
  std::vector<std::string> constant_texts_;
  std::vector<std::string> memory_texts_;
  std::vector<std::string> output_texts_;
  std::vector<std::string> print_texts_;

  metal_sim::Size3 grid_size_;
  metal_sim::Size3 threads_size_;
  std::map<int, MetalBuffer> buffers_;
  std::map<int, std::vector<uint8_t>> values_;
  std::map<int, std::vector<uint8_t>> constants_;
  std::map<int, int64_t> memory_;
  std::map<int, std::string> outputs_;
};

}  // namespace marlin::cli
