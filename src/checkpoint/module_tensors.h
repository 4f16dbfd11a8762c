// Which tensors a quantized module is stored as, and how config.json describes it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "checkpoint/module_reader.h"
#include "marlin/checkpoint.h"
#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

/// Version of the quantized directory that this build writes, and the newest that it reads.
inline constexpr int kCheckpointVersion = 1;
inline constexpr std::string_view kQuantMethod = "metal_marlin";

struct ModuleTensor {
  ModulePart part = ModulePart::kCodes;
  std::string name;
  DType dtype = DType::kU32;
  Shape shape;
  int64_t bytes = 0;
};

/// The common part of a module's tensor names: "a.b.weight" -> "a.b", and for stacked experts
/// "a.experts.*.b.weight" -> "a.experts.b".
std::string ModuleBaseName(std::string_view module_name);

/// The tensors that a module is stored as. Precondition: dimensions that passed ParseModules or
/// came from a tensor in memory.
std::vector<ModuleTensor> ModuleTensors(const ModuleRecord& record);

/// The view that holds a part; null for the codebook, which is no view.
const TensorView* PartView(const QuantizedWeights& weights, ModulePart part);

/// What "quantization_config" says.
// Json allocates when it is destroyed or moved from, says clang-tidy of the library's own code.
// NOLINTNEXTLINE(bugprone-exception-escape)
struct QuantizationConfig {
  std::string recipe_name;
  Json recipe_document;  ///< What MixedPrecisionConfig::FromJson reads.
  std::string method;
  std::vector<ModuleRecord> modules;  ///< In name order after parsing.
};

/// The checksum of such a value: of its compact text without "checksum".
std::string QuantizationConfigChecksum(const Json& json);
/// The value to store, checksum included.
Json BuildQuantizationConfig(const QuantizationConfig& config);

/// Reads it back. `file` is named in errors. Errors: kMalformedFile; kUnsupported for a newer
/// version.
Result<QuantizationConfig> ParseQuantizationConfig(const Json& json, const std::string& file);

}  // namespace marlin
