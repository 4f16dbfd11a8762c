// The tensors that store a quantized module, and its description in config.json.
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

/// The newest version of the quantized directory that this build reads and writes. Files get the
/// oldest version that holds their modules.
inline constexpr int kCheckpointVersion = 3;
inline constexpr std::string_view kQuantMethod = "metal_marlin";

struct ModuleTensor {
  ModulePart part = ModulePart::kCodes;
  std::string name;
  DType dtype = DType::kU32;
  Shape shape;
  int64_t bytes = 0;
};

/// The prefix of a module's tensor names: "a.b.weight" -> "a.b", and for stacked experts
/// "a.experts.*.b.weight" -> "a.experts.b".
std::string ModuleBaseName(std::string_view module_name);

/// The tensors that store a module. Precondition: dimensions from ParseModules or from a tensor in
/// memory.
std::vector<ModuleTensor> ModuleTensors(const ModuleRecord& record);

/// The view that holds a part; null for the codebook, which is not a view.
const TensorView* PartView(const QuantizedWeights& weights, ModulePart part);
TensorView* PartView(QuantizedWeights* weights, ModulePart part);

/// The content of "quantization_config" without the recipe's document.
struct QuantizationConfig {
  std::string recipe_name;
  std::string method;
  std::vector<ModuleRecord> modules;  ///< In name order after parsing.
};

/// The oldest version that holds a module of k-packed codes: 2 for u8, zeros of s8, zeros that are
/// not fp16, a global scale that divides, 2:4 and input transforms.
int OldestVersionOf(const WeightsSpec& spec);

/// Checksum of the compact text of a "quantization_config" without its "checksum".
std::string QuantizationConfigChecksum(const Json& json);
/// The JSON value to store, checksum included. `recipe_document` is what
/// MixedPrecisionConfig::FromJson reads.
Json BuildQuantizationConfig(const QuantizationConfig& config, const Json& recipe_document);

/// Parses it. `file` is named in errors. Errors: kMalformedFile; kUnsupported for a newer version.
Result<QuantizationConfig> ParseQuantizationConfig(const Json& json, const std::string& file);

}  // namespace marlin
