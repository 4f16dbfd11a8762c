// How the quantized modules of one kind of checkpoint are found and loaded. A reader is one file in
// readers/ and one row of readers.def; nothing else knows of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "checkpoint/io.h"
#include "checkpoint/tensor_store.h"
#include "marlin/checkpoint.h"
#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

/// How the source stored the matrix that became W [k, n].
enum class SourceLayout : uint8_t {
  kOutIn,  ///< [out, in] as torch.nn.Linear: the transpose of W.
  kInOut,  ///< [in, out] as W itself: GPT-2's Conv1D, the fused experts of gpt-oss and Llama 4.
};

/// A module with its place in a plain checkpoint.
struct ModuleRecord {
  QuantizedModule module;
  bool stacked = false;  ///< Experts in front: tensors and shape have one more dimension.
  SourceLayout layout = SourceLayout::kOutIn;
};

/// The parts of a module.
enum class ModulePart : uint8_t { kCodes, kScales, kZeros, kBiases, kGlobalScale, kCodebook };

/// A tensor that a module is made from, and the part of the module that it holds (the main one,
/// where it holds several).
struct PartTensor {
  ModulePart part = ModulePart::kCodes;
  size_t tensor = 0;  ///< Its number in the TensorStore.
};

/// The modules of one opened checkpoint. Immutable and thread-safe after it was opened.
class ModuleReader {
 public:
  virtual ~ModuleReader() = default;

  /// Every module, in name order.
  const std::vector<ModuleRecord>& modules() const { return modules_; }
  /// The recipe that the modules were quantized with; empty where none is recorded.
  const std::string& recipe_name() const { return recipe_name_; }

  /// The tensors that a module is made from. Every tensor of the store that is no module's part is
  /// a plain tensor.
  virtual std::vector<PartTensor> Parts(const ModuleRecord& record) const = 0;

  /// The module in the canonical layout. Views may lie in the store's mappings, which the caller
  /// keeps; copies belong to the result's owner. The values need not be validated. Errors:
  /// kMalformedFile, kOutOfMemory.
  virtual Result<QuantizedWeights> Load(const ModuleRecord& record) const = 0;

 protected:
  std::vector<ModuleRecord> modules_;
  std::string recipe_name_;
};

/// Where a checkpoint says how its weights are quantized.
struct QuantMethod {
  std::string name;   ///< "metal_marlin", "gptq", ...
  std::string where;  ///< Names the place in messages: "DIR/config.json: quantization_config".
  /// The object there; null: nothing says that the weights are quantized. It may be a part of the
  /// store's config.
  std::shared_ptr<const Json> config;
};

/// A reader is opened on a store whose tensors are there already, or, for a container other than
/// safetensors, on one that holds the mapped file alone: the reader then adds the tensors and
/// config.json's equivalent. The store outlives the reader and does not move.
using OpenReader = Result<std::unique_ptr<const ModuleReader>>(TensorStore& store,
                                                               const QuantMethod& method);

/// Files of one kind, by the end of their names and their first bytes.
struct Container {
  std::string_view suffix;
  std::string_view magic;
  OpenReader* open = nullptr;
};

/// Whether a file of a model's directory describes quantized weights in the place of config.json.
bool IsQuantizationFile(std::string_view name);
/// Removes from a config.json all that says how weights are quantized.
void RemoveQuantization(Json* config);

/// The container that a file belongs to, null for files of no known kind.
const Container* FindContainer(std::string_view file_name);

/// Reads how a directory's weights are quantized: from config.json, or from the file of its own
/// that some writers use. `names` are the directory's entries, sorted. Errors: kMalformedFile for
/// a place that holds something else than it should; kUnsupported for one that names no method.
Result<QuantMethod> FindQuantMethod(Io& io, const TensorStore& store,
                                    const std::vector<std::string>& names);

/// Opens the reader of a method on safetensors, or the one of plain checkpoints for none. Errors:
/// kUnsupported naming an unknown method and the known ones; those of the reader.
Result<std::unique_ptr<const ModuleReader>> OpenModules(TensorStore& store,
                                                        const QuantMethod& method);

}  // namespace marlin
