// Writes the safetensors shards of a checkpoint whose tensors are known in advance.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files/checksum.h"
#include "checkpoint/files/io.h"
#include "checkpoint/files/safetensors.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// One tensor to write.
struct OutputTensor {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  int64_t bytes = 0;
};

/// Tensors that are written together, into the same shard.
using OutputUnit = std::vector<OutputTensor>;

/// Limits of one shard. A unit is never split, however large it is.
struct ShardLimits {
  int64_t data_bytes = 0;
  int64_t header_bytes = kMaxHeaderBytes;  ///< The reader's limits.
  int64_t tensors = kMaxTensorCount;
};

/// The caller's note in the header of a finished shard.
struct ShardNote {
  int64_t number = 0;  ///< At least 0.
  std::string marks;   ///< A character of ASCII for each unit; empty: none.
};

/// Streams units into shards, one after the other. A shard's header is written last: until then the
/// file is not valid safetensors, so a shard that opens is complete.
class TensorWriter {
 public:
  /// Assigns consecutive units to shards.
  TensorWriter(Io& io, const std::vector<OutputUnit>& units, const ShardLimits& limits);

  /// The directory of the shards, for reading and writing.
  void SetDirectory(std::string directory) { directory_ = std::move(directory); }

  size_t shard_count() const { return shards_.size(); }
  const std::string& shard_name(size_t shard) const { return shards_[shard].name; }
  /// The file of a finished shard, whether found or written.
  const FileInfo& shard_file(size_t shard) const { return shards_[shard].file; }
  size_t first_unit(size_t shard) const { return shards_[shard].first_unit; }
  size_t unit_count(size_t shard) const { return shards_[shard].unit_count; }
  int64_t total_bytes() const { return total_bytes_; }

  /// Before all shards: their notes have marks.
  void ExpectMarks() { has_marks_ = true; }

  /// Whether a complete shard with intact checksums exists already; sets `note` to its note.
  bool FindFinished(size_t shard, ShardNote* note);

  /// Starts a shard, replacing any file of its name. Shards are written one at a time.
  Status BeginShard(size_t shard);
  /// Appends data to a tensor of a unit of the current shard.
  Status Append(size_t unit, size_t tensor, const void* data, int64_t bytes);
  /// Completes the current shard; FindFinished returns its note later.
  Status EndShard(const ShardNote& note);

  /// The text of model.safetensors.index.json; empty if there is a single shard.
  std::string IndexJson() const;

 private:
  struct Shard {
    std::string name;
    size_t first_unit = 0;
    size_t unit_count = 0;
    std::vector<SafetensorsEntry> entries;      // In file order.
    std::vector<std::vector<size_t>> entry_of;  // By unit of the shard, then tensor of the unit.
    int64_t bytes = 0;
    FileInfo file;
  };

  void CutShards(const std::vector<OutputUnit>& units, const ShardLimits& limits);
  void LayOut(const std::vector<OutputUnit>& units, Shard* shard);
  std::string Header(const Shard& shard, const std::vector<uint64_t>& digests,
                     const ShardNote& note) const;
  Status FindFinishedImpl(Shard& shard, ShardNote* note);
  static Status ReadNote(const SafetensorsHeader& header, ShardNote* note);

  Io& io_;
  std::string directory_;
  std::vector<Shard> shards_;
  int64_t total_bytes_ = 0;
  bool has_marks_ = false;

  FileHandle file_;  // The current shard.
  size_t current_ = 0;
  int64_t data_begin_ = 0;
  std::vector<int64_t> written_;     // By entry.
  std::vector<Checksum> checksums_;  // By entry.
};

}  // namespace marlin
