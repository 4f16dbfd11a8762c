// The common part of importing, dequantizing and converting a checkpoint: units of output in the
// order of the source's files, each module loaded once, progress.
#pragma once

#include <cstdint>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/convert/conversion.h"

namespace marlin {

/// One unit of output: a module, some of its experts, or a tensor to copy.
struct SourceUnit {
  const ModuleRecord* record = nullptr;  ///< Null: a copy.
  int64_t first_expert = 0;
  int64_t experts = 1;
  size_t tensor = 0;  ///< The copied tensor, or the module's first.
  OutputUnit outputs;
  int64_t parameters = 0;
};

/// A class derived from it says which tensors a module becomes, and writes them.
class UnitConverter {
 public:
  virtual ~UnitConverter() = default;

  /// Plans all modules and copies. Errors: from PlanModule.
  Status Plan();
  const std::vector<SourceUnit>& units() const { return units_; }
  int64_t parameters() const { return parameters_; }
  /// Makes a conversion write these units. The conversion must not outlive this object.
  void Attach(Conversion* conversion);

 protected:
  /// Both outlive this object.
  UnitConverter(const Checkpoint& checkpoint, const Progress& progress)
      : checkpoint_(checkpoint), source_(CheckpointAccess::Get(checkpoint)), progress_(progress) {}

  /// Adds the units of a module.
  virtual Status PlanModule(const ModuleRecord& record) = 0;
  /// Notes a tensor that is copied.
  virtual void PlanCopy(const TensorInfo& /*tensor*/) {}
  /// The weights of a module; the units of one module share them.
  virtual Result<QuantizedWeights> LoadModule(const ModuleRecord& record);
  /// Writes the loaded module's part in a unit; by default, expert by expert.
  virtual Status WriteModule(TensorWriter* writer, size_t unit, const QuantizedWeights& weights);
  virtual Status WriteExpert(TensorWriter* writer, size_t unit, const QuantizedWeights& expert,
                             int64_t number) = 0;

  /// Adds a unit of `count` experts from `first_expert`. Sets the outputs' sizes, and
  /// their names as the source stores them.
  void AddUnit(const ModuleRecord& record, int64_t first_expert, int64_t count, OutputUnit outputs);
  /// Adds a module's matrices as plain tensors, one for each expert that has a name of its own.
  void AddDense(const ModuleRecord& record, DType dtype);
  /// One expert as a plain checkpoint stores it, [out, in] or [in, out].
  Result<AlignedBuffer> MakeDense(const ModuleRecord& record, const QuantizedWeights& expert,
                                  DType dtype) const;

  void Advance(int64_t parameters);
  Status InModule(const ModuleRecord& record, const Status& status) const;

  const Checkpoint& checkpoint_;
  const Checkpoint::Impl& source_;

 private:
  Status Write(TensorWriter* writer, size_t unit);
  Status Load(const ModuleRecord& record);

  const Progress& progress_;
  std::vector<SourceUnit> units_;
  int64_t parameters_ = 0;
  int64_t done_ = 0;
  const ModuleRecord* loaded_ = nullptr;  ///< The module whose weights are in weights_.
  QuantizedWeights weights_;
};

/// Whether the experts of a module have names of their own in a plain checkpoint: its name has
/// ".*.".
bool HasExpertNames(const ModuleRecord& record);
/// A module's name with the number of an expert. Precondition: HasExpertNames.
std::string NameWithExpert(std::string_view module_name, int64_t expert);

/// The shape of one matrix of a module in a plain checkpoint.
Shape StoredShape(const ModuleRecord& record);

Status CheckShardBytes(int64_t shard_bytes);

/// Returns what `run` does. Exceptions become errors that begin with the source: kOutOfMemory "no
/// memory to <verb> it", kInternal.
template <typename Run>
auto WithoutExceptions(const std::string& source, std::string_view verb, const Run& run)
    -> decltype(run()) {
  try {
    return run();
  } catch (const ThreadStartError& error) {
    return Status(Code::kOutOfMemory, Printable(source) + ": " + error.what());
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory,
                  Printable(source) + ": no memory to " + std::string(verb) + " it");
  } catch (const std::exception& error) {
    return Status(Code::kInternal, Printable(source) + ": " + Printable(error.what()));
  }
}

}  // namespace marlin
