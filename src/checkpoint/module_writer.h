// The interface through which quantized modules are written in the format of another program. A
// writer is one file in writers/ and one row of writers.def; nothing else depends on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "checkpoint/files/tensor_writer.h"
#include "checkpoint/module_reader.h"
#include "marlin/checkpoint.h"
#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

/// A module, or one expert of it, as a target stores it.
struct ForeignModule {
  std::string name;      ///< Name of the weight in the plain checkpoint, without ".weight".
  WeightsSpec spec;      ///< spec.experts is 1 unless `stacked`.
  bool stacked = false;  ///< All experts in tensors with one more dimension, at the front.
};

/// Takes the data of a module's tensors in pieces.
class TensorSink {
 public:
  virtual ~TensorSink() = default;
  /// Appends to a tensor of the module's plan.
  virtual Status Append(size_t tensor, const void* data, int64_t bytes) = 0;
  template <typename T>
  Status AppendAll(size_t tensor, const std::vector<T>& values) {
    return Append(tensor, values.data(), static_cast<int64_t>(values.size() * sizeof(T)));
  }
};

/// Writes modules in one format. Errors of all functions are kUnsupported and say what the format
/// cannot hold; the caller names the tensor.
class ModuleWriter {
 public:
  virtual ~ModuleWriter() = default;

  /// Whether the experts of a layer's projection are one module. Its name keeps the ".*.".
  virtual bool StacksExperts() const { return false; }
  /// Whether weights with a permutation along k can be written.
  virtual bool HoldsPermutation() const { return false; }
  /// Names, types and shapes of a module's tensors.
  virtual Result<OutputUnit> Plan(const ForeignModule& module) const = 0;
  /// Appends the data of one matrix, the next expert of a stack.
  virtual Status Write(const QuantizedWeights& matrix, TensorSink* sink) const = 0;
  /// Describes all modules in config.json. `plain` are the unquantized matrices, without ".weight".
  virtual Status Configure(std::span<const ForeignModule> modules,
                           std::span<const std::string> plain, Json* config) const = 0;
};

using MakeWriter = std::unique_ptr<const ModuleWriter>();

/// kUnsupported for modules whose layout no other program has: matrices stored as [in, out], and
/// stacks of experts without a name for each.
Status CheckForeignLayout(const ModuleRecord& record);

/// The file, or the directory of shards, that a container writer is to write.
struct ContainerOutput {
  std::string path;
  bool overwrite = false;
  int64_t shard_bytes =
      0;  ///< Most bytes of tensors in a shard, unless one is larger; 0: one file.
  Progress progress;
};

/// Writes a checkpoint, quantized or not, as one file or a directory of shards, atomically. Returns
/// the files of the source that it does not hold, with the reason. Errors: kUnsupported naming the
/// tensor.
using WriteContainer = Result<std::vector<SkippedTensor>>(Io& io, const Checkpoint& checkpoint,
                                                          const ContainerOutput& output);

/// Whether a container holds modules of a model with the source's config.json, as
/// ModuleWriter::Plan and Configure say of a directory.
using CheckContainer = Status(const Checkpoint& source, std::span<const ModuleRecord> records);

}  // namespace marlin
