// What quantizing and dequantizing a checkpoint have in common: reading, writing, finishing.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/aligned_buffer.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/output_directory.h"
#include "checkpoint/tensor_writer.h"
#include "marlin/checkpoint.h"

namespace marlin {

/// A source tensor in memory, aligned for its type. Its pages are given back on destruction.
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

/// Copies a source tensor into the first tensor of a unit, piece by piece.
Status CopyTensor(const Checkpoint::Impl& source, size_t tensor, size_t unit, TensorWriter* writer);

/// Sixteen hexadecimal digits for everything that decides the output: the source's files and
/// headers, its configuration, and `parameters`.
std::string Fingerprint(const Checkpoint::Impl& source, std::string_view parameters);

/// One conversion of a checkpoint into a directory.
struct Conversion {
  std::string target;
  std::string fingerprint;
  OutputDirectory::Options options;
  std::vector<OutputUnit> units;
  int64_t shard_bytes = 0;
  std::string config_json;  ///< Written as config.json; empty: none.

  /// Writes the data of one unit; returns a number that is summed over all units and survives an
  /// interruption with the shard that it belongs to.
  std::function<Result<int64_t>(TensorWriter* writer, size_t unit)> write_unit;
  /// Called instead for the units of a shard that an interrupted run finished.
  std::function<void(size_t unit)> skip_unit;
};

/// Refuses what Checkpoint::Open would not read again, by its own limits, before anything is
/// written. Errors: kMalformedFile for two tensors of one name; kUnsupported, with both numbers,
/// for names and files past a limit.
Status CheckReadable(Io& io, const Checkpoint::Impl& source, const Conversion& conversion);

/// Writes all shards, the index, the source's small files (tokenizer, licence, ...) and
/// config.json, then gives the directory its name. Returns the sum of the units' numbers. After kIo
/// or kOutOfMemory a resumable run keeps what is finished; any other error leaves nothing.
/// Precondition: CheckReadable.
Result<int64_t> RunConversion(Io& io, const Checkpoint::Impl& source, const Conversion& conversion);

}  // namespace marlin
