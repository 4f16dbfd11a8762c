// The state that copies of a Checkpoint share; internal to this folder.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/aligned_buffer.h"
#include "checkpoint/files/io.h"
#include "checkpoint/files/tensor_store.h"
#include "checkpoint/module_reader.h"
#include "checkpoint/module_tensors.h"
#include "marlin/checkpoint.h"

namespace marlin {

struct Checkpoint::Impl : TensorStore {
  std::string quant_method;   ///< Empty: plain.
  bool in_container = false;  ///< Not safetensors.
  CheckpointOptions options;
  std::unique_ptr<const ModuleReader> reader;
  std::vector<QuantizedModule> modules;  ///< The reader's modules, as the public type.
  std::unordered_map<std::string_view, size_t> module_index;
  std::vector<bool> is_part;  ///< Whether a tensor is a module's part.
  /// Computed tensors that views were given of, by number.
  mutable std::map<size_t, AlignedBuffer> computed_data;
  mutable std::mutex computed_mutex;  ///< Guards computed_data.

  /// No directory of safetensors has the plain tensors as they are.
  bool other_form() const { return in_container || !computed.empty(); }
  bool quantized() const { return quant_method == kQuantMethod; }
  /// Frees computed tensors. Views of them become invalid.
  void ForgetComputed() const;
};

struct CheckpointAccess {
  /// Checkpoint::Open with a given Io.
  static Result<Checkpoint> Open(Io& io, const std::string& path,
                                 const CheckpointOptions& options = {});
  static const Checkpoint::Impl& Get(const Checkpoint& checkpoint) { return *checkpoint.impl_; }
  /// For changes before anything reads the checkpoint or a copy of it.
  static Checkpoint::Impl& GetMutable(Checkpoint* checkpoint) {
    return const_cast<Checkpoint::Impl&>(*checkpoint->impl_);
  }
};

/// The metadata key of a tensor's checksum, in the tensor's own file.
std::string ChecksumKey(std::string_view tensor_name);

}  // namespace marlin
