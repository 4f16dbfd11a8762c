// The interface through which one quantization method's modules are found and loaded. A reader is
// one file in readers/ and one row of readers.def; nothing else depends on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/thread_pool.h"
#include "checkpoint/files/io.h"
#include "checkpoint/files/tensor_store.h"
#include "marlin/checkpoint.h"
#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

/// How the source stored the matrix that became W [k, n].
enum class SourceLayout : uint8_t {
  kOutIn,  ///< [out, in] as torch.nn.Linear: the transpose of W.
  kInOut,  ///< [in, out] as W itself: GPT-2's Conv1D, the fused experts of gpt-oss and Llama 4.
};

/// How the values of a module relate to those that its own program computes in fp32.
enum class Exactness : uint8_t {
  kExact,    ///< Every value is equal.
  kLastBit,  ///< The codes and scales are equal; the other program rounds once more.
  kRounded,  ///< No format of codes holds the values, and importing quantized them again.
};

/// A module and its names and layout in the plain checkpoint.
struct ModuleRecord {
  QuantizedModule module;
  bool stacked = false;  ///< Experts in front: tensors and shape have one more dimension.
  SourceLayout layout = SourceLayout::kOutIn;
  PackedLayout codes = PackedLayout::kKPacked;  ///< In a quantized directory.
  Exactness exactness = Exactness::kExact;
  /// In a directory of this program: the methods of the matrices, where some got another one than
  /// the directory's: "mse", or "gptq, mse". Empty: all got that.
  std::string method;
};

/// The parts of a module.
enum class ModulePart : uint8_t {
  kCodes,
  kScales,
  kZeros,
  kBiases,
  kGlobalScale,
  kCodebook,
  kMetadata,
  kPermutation,
  kInputScale,
  kSuperScales,
  kSuperBiases,
};

/// A tensor that a module is made from, and the part of the module that it holds (the main one, if
/// several).
struct PartTensor {
  ModulePart part = ModulePart::kCodes;
  size_t tensor = 0;  ///< Its number in the TensorStore.
};

/// A small file of a model's directory that a container holds in another form, as its tokenizer.
struct ContainedFile {
  std::string name;
  std::string content;
  std::string obstacle;  ///< Not empty: why there is no content.
};

/// The threads that load modules, started by the first of them.
class LoadingPool {
 public:
  ThreadPool& Get() const {
    std::call_once(made_, [this] { pool_ = std::make_unique<ThreadPool>(0); });
    return *pool_;
  }

 private:
  mutable std::once_flag made_;
  mutable std::unique_ptr<ThreadPool> pool_;
};

/// The modules of one opened checkpoint. Immutable and thread-safe once opened.
class ModuleReader {
 public:
  virtual ~ModuleReader() = default;

  /// Every module, in name order.
  const std::vector<ModuleRecord>& modules() const { return modules_; }
  /// The recipe that the modules were quantized with; empty if not recorded.
  const std::string& recipe_name() const { return recipe_name_; }

  /// The tensors that a module is made from. Tensors of the store that belong to no module are
  /// plain.
  virtual std::vector<PartTensor> Parts(const ModuleRecord& record) const = 0;

  /// The module in the canonical layout. Views may point into the store's mappings, which the
  /// caller keeps alive; copies belong to the result's owner. Values may be unvalidated. Errors:
  /// kMalformedFile, kOutOfMemory.
  virtual Result<QuantizedWeights> Load(const ModuleRecord& record) const = 0;

  /// The small files that belong next to the weights in a directory, other than config.json; none
  /// if the checkpoint is a directory.
  virtual std::vector<ContainedFile> Files() const { return {}; }
  /// One of these; nothing if it is none of them.
  virtual std::optional<ContainedFile> File(const std::string& name) const;

 protected:
  std::vector<ModuleRecord> modules_;
  std::string recipe_name_;
};

/// A checkpoint's quantization method and its configuration.
struct QuantMethod {
  std::string name;   ///< "metal_marlin", "gptq", ...
  std::string where;  ///< Its origin for messages: "DIR/config.json: quantization_config".
  /// The object found there, perhaps a part of the store's config; null: the checkpoint is plain.
  std::shared_ptr<const Json> config;
};

/// Opens a reader on a store whose tensors have been read. For a container other than safetensors
/// the store holds only the mapped file, or all files of a sharded one: the reader then adds the
/// tensors and the equivalent of config.json. The store outlives the reader and does not move.
using OpenReader = Result<std::unique_ptr<const ModuleReader>>(TensorStore& store,
                                                               const QuantMethod& method);

/// A file format, recognized by file-name suffix and magic bytes.
struct Container {
  std::string_view suffix;
  std::string_view magic;
  OpenReader* open = nullptr;
};

/// Whether a file of a model's directory describes quantization in place of config.json.
bool IsQuantizationFile(std::string_view name);
/// Removes all descriptions of quantization from a config.json.
void RemoveQuantization(Json* config);

/// The container of a file, by its suffix; null if unknown.
const Container* FindContainer(std::string_view file_name);
/// True for the suffixes of containers other than safetensors.
bool IsOtherContainer(std::string_view file_name);

/// Finds a directory's quantization method: in config.json, or in the separate file that some
/// writers use. `names` are the directory's entries, sorted. Errors: kMalformedFile for an entry of
/// the wrong type; kUnsupported for one that names no method.
Result<QuantMethod> FindQuantMethod(Io& io, const TensorStore& store,
                                    const std::vector<std::string>& names);

/// Opens a method's reader on safetensors, or the reader of plain checkpoints if there is no
/// method. Errors: kUnsupported naming an unknown method and the known ones; from the reader.
Result<std::unique_ptr<const ModuleReader>> OpenModules(TensorStore& store,
                                                        const QuantMethod& method);

}  // namespace marlin
