// Checkpoints on disk: safetensors files, sharded directories, and quantized directories.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "marlin/quantize.h"
#include "marlin/recipe.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

#pragma GCC visibility push(default)
namespace marlin {

/// One tensor of a checkpoint as its file describes it.
struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  std::string file;    ///< File name inside the checkpoint.
  int64_t offset = 0;  ///< Byte offset of the data in that file.
  int64_t bytes = 0;
};

/// A quantized module of a checkpoint: the weight "<name>" (as the source called it; for stacked
/// experts the common name with "*" for the expert number) and what it became.
struct QuantizedModule {
  std::string name;
  WeightsSpec spec;
  LayerClass layer_class = LayerClass::kOther;
};

/// An opened checkpoint: a .safetensors file, or a directory with one or more of them. Files are
/// mapped, not read; opening checks every header and extent. Copies share the mapping; thread-safe.
class Checkpoint {
 public:
  /// Errors: kIo, kMalformedFile naming file, tensor and numbers, kUnsupported for a quantized
  /// directory written by a newer version, or quantized by a method that cannot be read: named,
  /// with those that can.
  static Result<Checkpoint> Open(const std::string& path);

  const std::string& path() const;
  /// Every stored tensor, in name order (for a quantized one: X.qweight, X.scales, ...).
  const std::vector<TensorInfo>& tensors() const;
  const TensorInfo* Find(const std::string& name) const;
  /// A view of a tensor's bytes in the mapping. The data may be unaligned for its type.
  /// Errors: kInvalidArgument for an unknown name.
  Result<TensorView> Tensor(const std::string& name) const;
  /// The text of config.json; empty when there is none.
  const std::string& config_json() const;

  /// True for a directory that this project wrote.
  bool quantized() const;
  /// How the weights are quantized: "metal_marlin" for a directory that this project wrote, another
  /// method's or container's name for those of others that can be read, empty for a plain
  /// checkpoint.
  const std::string& quant_method() const;
  const std::string& recipe_name() const;
  const std::vector<QuantizedModule>& modules() const;
  /// True for a tensor that is stored as a part of a module: "X.qweight", "X.scales", ...
  bool IsModulePart(const std::string& tensor_name) const;
  /// Loads a quantized module without copying where alignment allows. The result keeps the mapping
  /// alive. Errors: kInvalidArgument for an unknown name, kMalformedFile from Validate.
  Result<QuantizedWeights> Weights(const std::string& module_name) const;
  /// Compares every tensor with its stored checksum, then checks every module's values as Weights()
  /// does. Errors: kMalformedFile naming the first tensor that differs or cannot be loaded.
  Status VerifyChecksums() const;

  struct Impl;

 private:
  friend struct CheckpointAccess;
  explicit Checkpoint(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

/// Called with (done, total) parameters; may be empty.
using Progress = std::function<void(int64_t done, int64_t total)>;

struct QuantizeCheckpointOptions {
  MixedPrecisionConfig recipe;
  QuantizeMethod method = QuantizeMethod::kRtn;
  int64_t shard_bytes = int64_t{5} << 30;
  bool strict = false;     ///< A matrix of a quantized class that cannot be quantized is an error.
  bool overwrite = false;  ///< Replaces an existing output.
  bool resume = false;     ///< Continues an interrupted run of the same source and recipe.
  bool dry_run = false;    ///< Plans and reports without writing.
  Progress progress;
};

struct SkippedTensor {
  std::string name;
  std::string reason;
};

/// What quantizing a checkpoint did; the fields of `quantize --json`.
struct QuantizeCheckpointReport {
  std::string output;
  int64_t tensors = 0;     ///< Source tensors.
  int64_t parameters = 0;  ///< Elements of all source tensors.
  int64_t quantized_parameters = 0;
  double bits_per_weight = 0;  ///< Over all parameters, scales included.
  int64_t bytes = 0;           ///< Of the tensors written.
  double coverage = 0;         ///< quantized_parameters / parameters.
  std::vector<SkippedTensor> skipped;
  int64_t zeroed_groups = 0;
  double seconds = 0;
};

/// Quantizes a plain checkpoint into a directory that appears whole or not at all. Streams: peak
/// memory is bounded by the largest tensor, not by the checkpoint. Errors name file and tensor.
Result<QuantizeCheckpointReport> QuantizeCheckpoint(const std::string& source,
                                                    const std::string& output,
                                                    const QuantizeCheckpointOptions& options);

/// Writes a quantized directory back as a plain checkpoint of f32, bf16 or f16, atomically.
Status DequantizeCheckpoint(const std::string& source, const std::string& output, DType dtype,
                            bool overwrite, const Progress& progress = {});

}  // namespace marlin
#pragma GCC visibility pop
