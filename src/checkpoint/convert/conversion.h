// The common part of quantizing and dequantizing a checkpoint: reading, writing, committing.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/aligned_buffer.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/files/output_directory.h"
#include "checkpoint/files/tensor_writer.h"
#include "marlin/checkpoint.h"

namespace marlin {

/// A source tensor in memory, aligned for its type. Its pages are released on destruction.
class LoadedTensor {
 public:
  static Result<LoadedTensor> Load(const Checkpoint::Impl& source, size_t tensor);
  LoadedTensor(LoadedTensor&& other) noexcept = default;
  LoadedTensor& operator=(LoadedTensor&&) = delete;
  ~LoadedTensor();

  const TensorView& view() const { return view_; }

 private:
  LoadedTensor() = default;
  TensorView view_;
  AlignedBuffer copy_;
  std::shared_ptr<const Mapping> mapping_;
  int64_t offset_ = 0;
  int64_t bytes_ = 0;
};

/// One matrix of a stack of experts; with expert -1 all of a tensor.
TensorView MatrixOf(const TensorView& tensor, int64_t expert);

/// Copies a source tensor into the first tensor of a unit, in chunks.
Status CopyTensor(const Checkpoint::Impl& source, size_t tensor, size_t unit, TensorWriter* writer);

/// Sixteen hexadecimal digits that identify all inputs of the output: the source's files and
/// headers, its configuration, and `parameters`.
std::string Fingerprint(const Checkpoint::Impl& source, std::string_view parameters);

/// Whether a file of a model's directory is copied with it: tokenizer, template, licence. False for
/// what describes the weights.
bool IsSideFile(std::string_view name);

/// All files and directories of the source, by identity, because links can give them other names.
Result<std::map<FileIdentity, std::string>> SourceFiles(Io& io, const Checkpoint::Impl& source);

/// One conversion of a checkpoint into an output directory.
struct Conversion {
  std::string target;
  std::string fingerprint;
  OutputDirectory::Options options;
  std::vector<OutputUnit> units;
  int64_t shard_bytes = 0;
  std::string config_json;  ///< Written as config.json; empty: none.
  /// The config.json of what was written, of config_json's size or less, asked for once all units
  /// are; null: config_json. An error leaves no output.
  std::function<Result<std::string>()> written_config;

  /// The model card, asked for once all units are written; null: none is made. A card of an
  /// existing target that somebody wrote or changed is kept either way.
  std::function<Result<std::string>()> model_card;

  /// Writes the data of one unit. Returns a number that is summed over all units; it is stored in
  /// the unit's shard, so that it survives an interruption.
  std::function<Result<int64_t>(TensorWriter* writer, size_t unit)> write_unit;
  /// A character of ASCII for a unit that write_unit has written; it is stored in the unit's shard,
  /// too. Null: there are none.
  std::function<char(size_t unit)> mark;
  /// Called instead of write_unit for the units of a shard that an interrupted run finished, with
  /// the unit's mark, 0 without marks.
  std::function<void(size_t unit, char mark)> skip_unit;
};

/// Rejects, before anything is written, output that exceeds the limits of Checkpoint::Open. Errors:
/// kMalformedFile for two tensors of one name; kUnsupported, with both numbers, for names and files
/// beyond a limit.
Status CheckReadable(Io& io, const Checkpoint::Impl& source, const Conversion& conversion);

/// Writes all shards, the index, the source's small files (tokenizer, licence, ...) and
/// config.json, then renames the directory into place. Returns the sum of the units' numbers. After
/// kIo or kOutOfMemory a resumable run keeps the finished shards; any other error leaves nothing.
/// Precondition: CheckReadable.
Result<int64_t> RunConversion(Io& io, const Checkpoint::Impl& source, const Conversion& conversion);

}  // namespace marlin
