// The named tensors of a checkpoint's files: mapped, all extents checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "checkpoint/files/io.h"
#include "marlin/checkpoint.h"
#include "marlin/status.h"

namespace marlin {

struct CheckpointFile {
  std::string name;
  FileInfo info;
  std::shared_ptr<const Mapping> mapping;
  int64_t data_begin = 0;
};

struct TensorStore {
  std::string path;
  bool is_directory = false;
  Io* io = nullptr;  ///< For files that others name; only while the checkpoint is opened.
  std::vector<CheckpointFile> files;               ///< In name order.
  std::vector<TensorInfo> tensors;                 ///< In name order.
  std::vector<uint32_t> tensor_file;               ///< The file of each tensor.
  std::vector<std::optional<uint64_t>> checksums;  ///< The stored checksum of each tensor, if any.
  std::string config_json;
  std::shared_ptr<const Json> parsed_config;  ///< config() if there is a config.json.
  std::vector<std::string> notes;  ///< Lines about what is read otherwise than it is stored.
  bool full_names = false;         ///< Tensors got their FullDecoderName (decoder_names.h).
  /// Beginnings of the names of a multimodal checkpoint's text model, stored and as in `tensors`.
  std::vector<std::pair<std::string, std::string>> text_prefixes;
  /// Tensors that no file holds as they are, such as rows in another order: each is computed into
  /// `bytes` bytes, aligned to 64. Their extents in the files are the place of what is read.
  std::map<size_t, std::function<void(std::byte* out)>> computed;

  /// config_json parsed; null when there is none.
  const Json& config() const;
  /// Takes the text of config.json. Errors: from ParseJsonObject, which name `file`.
  Status SetConfig(std::string text, const std::string& file);

  /// The index of a tensor. Binary search in the sorted names: for the maximum number of tensors a
  /// hash table would exceed the memory that opening may use.
  std::optional<size_t> FindTensor(std::string_view name) const;

  const Mapping& MappingOf(size_t tensor) const { return *files[tensor_file[tensor]].mapping; }
  /// The first byte of a tensor; may be unaligned for its type. Precondition: it is not computed.
  const std::byte* Data(size_t tensor) const {
    return MappingOf(tensor).data() + tensors[tensor].offset;
  }
  /// Lets the kernel drop a tensor's pages.
  void Release(size_t tensor) const;
};

/// Sorts the tensors of all files by name and records the file of each. Errors: kMalformedFile for
/// duplicate names.
Status SortTensors(TensorStore* store);

/// A tensor that is computed from others.
struct ComputedTensor {
  TensorInfo info;  ///< Its place in a file is the largest one's.
  std::function<void(std::byte* out)> compute;
};

/// Replaces the tensors of these numbers by computed ones; all numbers change. Precondition: the
/// tensors are sorted, and none is computed. Errors: kMalformedFile for a name that is taken.
Status ReplaceTensors(const std::vector<size_t>& replaced, std::vector<ComputedTensor> made,
                      TensorStore* store);

}  // namespace marlin
