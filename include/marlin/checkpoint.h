// Checkpoints on disk: safetensors files, sharded directories, and quantized directories.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "marlin/model_ends.h"
#include "marlin/quantize.h"
#include "marlin/recipe.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

#pragma GCC visibility push(default)
namespace marlin {

/// One tensor of a checkpoint, as the file header describes it.
struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  std::string file;    ///< File name inside the checkpoint.
  int64_t offset = 0;  ///< Byte offset of the data in that file.
  int64_t bytes = 0;   ///< Size of the data.
};

/// A quantized module of a checkpoint: the name of its source weight (for stacked experts the
/// common name with "*" for the expert index) and its quantized form.
struct QuantizedModule {
  std::string name;
  WeightsSpec spec;
  LayerClass layer_class = LayerClass::kOther;
};

/// Options of Checkpoint::Open.
struct CheckpointOptions {
  /// Leaves out tensors that the index of a sharded directory does not list, takes those that it
  /// lists in another file, and lets a model ignore tensors that its type does not have. All these
  /// are errors otherwise, for they may be what is missing elsewhere.
  bool allow_extra_tensors = false;
};

/// An open checkpoint: a .safetensors file, a directory with one or more of them, or a file of
/// another program (GGUF), named or alone in a directory. Files are memory-mapped; Open checks
/// every header and extent but reads no weights. Copies share the mapping; thread-safe.
class Checkpoint {
 public:
  /// Opens a file or directory. Errors: kIo; kMalformedFile naming file, tensor and numbers;
  /// kUnsupported for a quantized directory written by a newer version, or by an unknown
  /// quantization method (the message lists the supported ones).
  static Result<Checkpoint> Open(const std::string& path, const CheckpointOptions& options = {});

  /// The path that was opened.
  const std::string& path() const;
  /// Every stored tensor, in name order (for a quantized one: X.qweight, X.scales, ...).
  const std::vector<TensorInfo>& tensors() const;
  /// Returns null when there is no such tensor. The pointer is valid as long as the checkpoint.
  const TensorInfo* Find(const std::string& name) const;
  /// A view of a tensor's bytes in the mapping, which must outlive it. The data may be unaligned
  /// for its type. Errors: kInvalidArgument for an unknown name.
  Result<TensorView> Tensor(const std::string& name) const;
  /// The text of config.json, or what a container holds in its place; empty if absent.
  const std::string& config_json() const;
  /// Lines about what is read otherwise than it is stored: names of a base model, a head of its own
  /// next to a config.json that ties it. Empty for most.
  const std::vector<std::string>& notes() const;

  /// True for a directory written by QuantizeCheckpoint.
  bool quantized() const;
  /// The quantization method: "metal_marlin" for a directory written by QuantizeCheckpoint, the
  /// name of the method or container for supported third-party checkpoints, empty for an
  /// unquantized one.
  const std::string& quant_method() const;
  /// The recipe that the checkpoint was quantized with; empty if none is recorded.
  const std::string& recipe_name() const;
  /// The quantized modules, in name order.
  const std::vector<QuantizedModule>& modules() const;
  /// True for a tensor that stores part of a quantized module: "X.qweight", "X.scales", ...
  bool IsModulePart(const std::string& tensor_name) const;
  /// Loads a quantized module, without a copy where layout and alignment allow. The result keeps
  /// the mapping alive. Errors: kInvalidArgument for an unknown name, kMalformedFile from Validate,
  /// kOutOfMemory.
  Result<QuantizedWeights> Weights(const std::string& module_name) const;
  /// A small text file that belongs to the model, of its directory or contained in its file:
  /// "tokenizer.json". Nothing if there is none. Errors: kIo, kMalformedFile; kUnsupported for
  /// content that the file's format cannot express.
  Result<std::optional<std::string>> ReadFile(const std::string& name) const;
  /// Compares every tensor with its stored checksum, then validates every module as Weights() does.
  /// Checkpoints of other programs store no checksums: for them only the modules are validated.
  /// Errors: kMalformedFile naming the first tensor that has no checksum, differs or cannot be
  /// loaded.
  Status VerifyChecksums() const;

  struct Impl;

 private:
  friend struct CheckpointAccess;
  explicit Checkpoint(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

/// Whether any tensor belongs to a routed expert.
bool HasExperts(const Checkpoint& checkpoint);

/// Called with (done, total) parameters; may be empty.
using Progress = std::function<void(int64_t done, int64_t total)>;

/// Options of QuantizeCheckpoint.
struct QuantizeCheckpointOptions {
  MixedPrecisionConfig recipe;
  QuantizeMethod method = QuantizeMethod::kRtn;
  /// kMarlinW4: dense 4-bit matrices are stored in these tiles, which version 3 of the format
  /// holds; all others as ever. Readers repack them, so it is a layout for other programs.
  PackedLayout layout = PackedLayout::kKPacked;
  /// Maximum size of an output file, in bytes.
  int64_t shard_bytes = int64_t{5} << 30;
  bool strict = false;     ///< Fail if a matrix that the recipe quantizes cannot be quantized.
  bool overwrite = false;  ///< Replace an existing output.
  bool resume = false;     ///< Continue an interrupted run of the same source and recipe.
  bool dry_run = false;    ///< Plan and report without writing.
  /// Write a model card, README.md, which describes source, recipe and formats to the Hugging Face
  /// Hub. One that somebody wrote or changed in an output to replace is kept either way.
  bool model_card = false;
  bool allow_extra_tensors = false;  ///< As in CheckpointOptions, for the source.
  Progress progress;
};

/// A tensor that was left unquantized, and why.
struct SkippedTensor {
  std::string name;
  std::string reason;
};

/// The result of QuantizeCheckpoint; the fields of `quantize --json`.
struct QuantizeCheckpointReport {
  std::string output;      ///< Output directory.
  int64_t tensors = 0;     ///< Source tensors.
  int64_t parameters = 0;  ///< Elements of all source tensors.
  int64_t quantized_parameters = 0;
  double bits_per_weight = 0;            ///< Over all parameters, scales included.
  double quantized_bits_per_weight = 0;  ///< Codes, scales and zeros of the quantized ones.
  int64_t bytes = 0;                     ///< Size of the tensors written.
  double coverage = 0;                   ///< quantized_parameters / parameters.
  ModelEnds ends;                        ///< As written.
  std::vector<SkippedTensor> skipped;
  /// Methods with data: elements of the matrices whose codes the data decided.
  int64_t calibrated_parameters = 0;
  /// Matrices that the method had no data or too little for, and what was used instead.
  std::vector<SkippedTensor> fallbacks;
  int64_t zeroed_groups = 0;  ///< Groups whose scale underflowed to zero.
  int64_t inputs = 0;         ///< Methods with awq: inputs of layers that scales were searched for.
  int64_t scaled_inputs = 0;  ///< Those that got scales.
  int64_t rotatable = 0;      ///< Matrices whose recipe has Hadamard blocks.
  int64_t rotated = 0;        ///< Those that got them, because they lower the error.
  /// The source's model_type, if this library cannot run it; otherwise empty.
  std::string unsupported_type;
  std::vector<std::string> notes;  ///< Checkpoint::notes() of the source.
  double seconds = 0;              ///< Wall time.
};

/// Quantizes an unquantized checkpoint into a new directory, which is written atomically. Tensors
/// are streamed: peak memory is bounded by the largest tensor, not by the checkpoint. Errors name
/// file and tensor; kInvalidArgument for a method that is QuantizeCalibrated's (calibrate.h).
Result<QuantizeCheckpointReport> QuantizeCheckpoint(const std::string& source,
                                                    const std::string& output,
                                                    const QuantizeCheckpointOptions& options);

/// Options of ImportCheckpoint.
struct ImportCheckpointOptions {
  /// Maximum size of an output file, in bytes.
  int64_t shard_bytes = int64_t{5} << 30;
  bool overwrite = false;  ///< Replace an existing output.
  bool dry_run = false;    ///< Plan and report without writing.
  /// Quantize modules that no format of codes holds, which are written as floats otherwise, to s8
  /// in groups of 32.
  bool allow_requantize = false;
  bool model_card = false;           ///< As in QuantizeCheckpointOptions.
  bool allow_extra_tensors = false;  ///< As in CheckpointOptions, for the source.
  Progress progress;
};

/// A module as ImportCheckpoint writes it.
struct ImportedModule {
  std::string name;
  WeightsSpec spec;
  /// "exact" (every value is equal to what the source's own program computes in fp32), "exact to
  /// the last bit of fp32" (that program rounds once more) or "re-rounded".
  std::string exactness;
  double growth = 1;  ///< Stored bytes relative to the source.
  /// For a module that was re-rounded, unless in a dry run: the root mean square of the errors
  /// relative to the weights, and the largest error.
  double relative_error = 0;
  double max_error = 0;
};

/// The result of ImportCheckpoint; the fields of `import --json`.
struct ImportCheckpointReport {
  std::string output;      ///< Output directory.
  std::string method;      ///< The source's: "gguf", "gptq", ...
  int64_t tensors = 0;     ///< Modules, and tensors that are no part of one.
  int64_t parameters = 0;  ///< Elements of all of them.
  int64_t quantized_parameters = 0;
  double bits_per_weight = 0;           ///< Over all parameters, scales included.
  int64_t bytes = 0;                    ///< Size of the tensors written.
  int64_t source_bytes = 0;             ///< Size of the tensors read.
  double coverage = 0;                  ///< quantized_parameters / parameters.
  std::vector<ImportedModule> modules;  ///< In name order.
  std::vector<SkippedTensor> skipped;   ///< Matrices that the source does not quantize.
  std::vector<SkippedTensor> files;     ///< Files of the model that could not be converted.
  std::vector<std::string> notes;       ///< Checkpoint::notes() of the source.
  double seconds = 0;                   ///< Wall time.
};

/// Converts a checkpoint of another program, a directory or a file, to a directory of this one,
/// atomically. Codes are kept, not quantized again. A source in a container (GGUF) that is not
/// quantized becomes an unquantized directory. Peak memory is bounded by the largest module.
/// Errors: as Checkpoint::Open; kInvalidArgument for a source that is a directory of this
/// program, or an unquantized one.
Result<ImportCheckpointReport> ImportCheckpoint(const std::string& source,
                                                const std::string& output,
                                                const ImportCheckpointOptions& options);

/// Dequantizes a quantized checkpoint, also one of another program, to an unquantized f32, bf16 or
/// f16 checkpoint, atomically. `options` open the source. Errors: as
/// Checkpoint::Open; kInvalidArgument for another type, or a source without quantized modules;
/// kUnsupported naming the first weight that overflows the type.
Status DequantizeCheckpoint(const std::string& source, const std::string& output, DType dtype,
                            bool overwrite, const Progress& progress = {},
                            const CheckpointOptions& options = {});

/// Options of ConvertCheckpoint.
struct ConvertCheckpointOptions {
  std::string target;      ///< One of ConversionTargets(); "plain": an unquantized f32 checkpoint.
  bool overwrite = false;  ///< Replace an existing output.
  /// Maximum size of a safetensors file, in bytes; for GGUF the tensors of a shard, where
  /// the output does not end in ".gguf" and is then a directory of shards.
  int64_t shard_bytes = int64_t{5} << 30;
  bool model_card = false;           ///< As in QuantizeCheckpointOptions; for directories.
  bool allow_extra_tensors = false;  ///< As in CheckpointOptions, for the source.
  Progress progress;
};

/// The result of ConvertCheckpoint; the fields of `export --json`.
struct ConvertCheckpointReport {
  std::string output;  ///< The directory, or for GGUF the file or the directory of shards.
  std::string target;
  std::vector<SkippedTensor> files;  ///< Files of the model that the target does not hold.
  std::vector<std::string> notes;    ///< Checkpoint::notes() of the source.
  double seconds = 0;                ///< Wall time.
};

/// Writes a quantized checkpoint in the format of another program, atomically: codes, scales and
/// zeros are kept, so that every weight has the same value in fp32. Tensors of no module are
/// copied. "gguf" also takes unquantized checkpoints, and writes one file. Errors: kUnsupported
/// naming the first module that the target cannot hold, and what would be lost; kInvalidArgument
/// for an unknown target or a source without quantized modules.
Result<ConvertCheckpointReport> ConvertCheckpoint(const std::string& source,
                                                  const std::string& output,
                                                  const ConvertCheckpointOptions& options);

/// The formats that ConvertCheckpoint writes.
std::vector<std::string> ConversionTargets();

}  // namespace marlin
#pragma GCC visibility pop
