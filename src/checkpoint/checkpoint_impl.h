// What a Checkpoint shares between its copies, for the rest of this folder.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/io.h"
#include "checkpoint/module_tensors.h"
#include "marlin/checkpoint.h"

namespace marlin {

struct CheckpointFile {
  std::string name;
  FileInfo info;
  std::shared_ptr<const Mapping> mapping;
  int64_t data_begin = 0;
};

// NOLINTNEXTLINE(bugprone-exception-escape): moving a Json asserts its invariant and cannot throw.
struct Checkpoint::Impl {
  std::string path;
  bool is_directory = false;
  std::vector<CheckpointFile> files;               ///< The safetensors files, in name order.
  std::vector<TensorInfo> tensors;                 ///< In name order.
  std::vector<uint32_t> tensor_file;               ///< Of each tensor, its file.
  std::vector<std::optional<uint64_t>> checksums;  ///< Of each tensor, when stored.
  std::string config_json;
  Json config;  ///< config_json parsed; null when there is none.
  bool quantized = false;
  QuantizationConfig quantization;
  std::vector<QuantizedModule> modules;  ///< Those of `quantization`, as the public type.
  std::unordered_map<std::string_view, size_t> module_index;

  /// The number of a tensor. A search in the sorted names: a hash table of the most tensors that a
  /// file may have would take more memory than opening is allowed.
  std::optional<size_t> FindTensor(std::string_view name) const;
};

struct CheckpointAccess {
  /// Checkpoint::Open on a given file system.
  static Result<Checkpoint> Open(Io& io, const std::string& path);
  static const Checkpoint::Impl& Get(const Checkpoint& checkpoint) { return *checkpoint.impl_; }
};

/// The metadata key under which a tensor's checksum is stored in its own file.
std::string ChecksumKey(std::string_view tensor_name);

/// Checks that every tensor of every module is there with its type and shape.
Status CheckModuleTensors(const Checkpoint::Impl& impl);

}  // namespace marlin
