// Writes the safetensors shards of a checkpoint whose tensors are known before their data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checksum.h"
#include "checkpoint/io.h"
#include "checkpoint/safetensors.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// One tensor to be written.
struct OutputTensor {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  int64_t bytes = 0;
};

/// Tensors that are written together and stay in one shard.
using OutputUnit = std::vector<OutputTensor>;

/// Streams units into shards, one after the other. A shard's header is written last: until then
/// the file is no safetensors file, so a shard that opens is a complete one.
class TensorWriter {
 public:
  /// Lays out the shards: consecutive units, at most shard_bytes of data unless one unit is larger.
  TensorWriter(Io& io, std::string directory, const std::vector<OutputUnit>& units,
               int64_t shard_bytes);

  size_t shard_count() const { return shards_.size(); }
  const std::string& shard_name(size_t shard) const { return shards_[shard].name; }
  size_t first_unit(size_t shard) const { return shards_[shard].first_unit; }
  size_t unit_count(size_t shard) const { return shards_[shard].unit_count; }
  int64_t total_bytes() const { return total_bytes_; }

  /// Whether a complete shard with intact checksums is in the directory already; its note is
  /// returned through `note`.
  bool FindFinished(size_t shard, int64_t* note);

  /// Starts a shard. Shards are written one at a time.
  Status BeginShard(size_t shard);
  /// Adds data to the end of a tensor of a unit of the current shard.
  Status Append(size_t unit, size_t tensor, const void* data, int64_t bytes);
  /// Completes the current shard; `note` is a number for FindFinished to return, >= 0.
  Status EndShard(int64_t note);

  /// The text of model.safetensors.index.json; empty when there is a single shard.
  std::string IndexJson() const;

 private:
  struct Shard {
    std::string name;
    size_t first_unit = 0;
    size_t unit_count = 0;
    std::vector<SafetensorsEntry> entries;      // In file order.
    std::vector<std::vector<size_t>> entry_of;  // By unit of the shard and tensor of the unit.
    int64_t bytes = 0;
  };

  void CutShards(const std::vector<OutputUnit>& units, int64_t shard_bytes);
  void LayOut(const std::vector<OutputUnit>& units, Shard* shard);
  std::string Header(const Shard& shard, const std::vector<uint64_t>& digests, int64_t note) const;
  Status FindFinishedImpl(const Shard& shard, int64_t* note);

  Io& io_;
  std::string directory_;
  std::vector<Shard> shards_;
  int64_t total_bytes_ = 0;

  FileHandle file_;  // Of the current shard.
  size_t current_ = 0;
  int64_t data_begin_ = 0;
  std::vector<int64_t> written_;     // By entry.
  std::vector<Checksum> checksums_;  // By entry.
};

}  // namespace marlin
