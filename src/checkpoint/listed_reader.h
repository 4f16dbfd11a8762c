// The base of readers that describe each module by its tensors and a function that loads it.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/function_ref.h"
#include "checkpoint/module_reader.h"
#include "layout/weights_buffer.h"

namespace marlin {

class ListedReader final : public ModuleReader {
 public:
  /// Fills allocated weights from the mapped files. The pool is the reader's. Errors:
  /// kMalformedFile, without the module's name.
  using Fill = std::function<Status(WeightsBuffer* buffer, ThreadPool& pool)>;

  explicit ListedReader(const TensorStore& store) : store_(store) {}

  /// A reader of the modules that `add` adds. Errors: from `add` and Finish.
  static Result<std::unique_ptr<const ModuleReader>> Open(
      const TensorStore& store, FunctionRef<Status(ListedReader* reader)> add);

  /// Adds a module; `parts` begins with its codes, and tensors that the weights do not need, such
  /// as scales of activations, come last, as codes.
  void Add(ModuleRecord record, std::vector<PartTensor> parts, Fill fill);

  /// The spec of the module added last.
  const WeightsSpec& last() const { return entries_.back().record.module.spec; }
  /// Says that products of the module added last rotate their inputs by Hadamard blocks of a size.
  /// Errors: kUnsupported, naming the module, for weights that cannot have them.
  Status RotateLast(int64_t hadamard);

  /// Sorts the modules. Errors: kMalformedFile for a module described twice or named like a plain
  /// tensor, and for a tensor of two modules; kUnsupported for a matrix of codes in no module.
  Status Finish();

  std::vector<PartTensor> Parts(const ModuleRecord& record) const override;
  Result<QuantizedWeights> Load(const ModuleRecord& record) const override;

 private:
  struct Entry {
    ModuleRecord record;
    std::vector<PartTensor> parts;
    Fill fill;
  };
  Status CheckRest(const std::unordered_map<size_t, const Entry*>& owners) const;
  const Entry* Find(const ModuleRecord& record) const;

  const TensorStore& store_;
  std::vector<Entry> entries_;  ///< In the order of modules_ after Finish.
  LoadingPool pool_;
};

/// The tensors of a module under construction: each is found, checked and recorded as a part.
class ModuleTensorFinder {
 public:
  ModuleTensorFinder(const TensorStore& store, std::string base)
      : store_(store), base_(std::move(base)) {}

  const std::string& base() const { return base_; }
  const TensorStore& store() const { return store_; }

  bool Has(std::string_view suffix) const;
  /// The description of base + suffix; null if there is none. Records nothing.
  const TensorInfo* Look(std::string_view suffix) const;
  /// A tensor of one of the types. Errors: kMalformedFile naming it and the types.
  Result<size_t> Need(ModulePart part, std::string_view suffix,
                      std::initializer_list<DType> dtypes);
  /// The same with a shape, which the message names.
  Result<size_t> Need(ModulePart part, std::string_view suffix, std::initializer_list<DType> dtypes,
                      const Shape& shape);
  /// Records tensors that the weights do not need, where they exist.
  void TakeUnused(std::initializer_list<std::string_view> suffixes);
  /// kMalformedFile, naming the file's path and base + suffix.
  Status Malformed(std::string_view suffix, const std::string& message) const;
  Status Unsupported(const std::string& message) const;

  const std::byte* Data(size_t tensor) const { return store_.Data(tensor); }
  const Shape& ShapeOf(size_t tensor) const { return store_.tensors[tensor].shape; }
  DType TypeOf(size_t tensor) const { return store_.tensors[tensor].dtype; }

  /// The parts recorded so far, unused ones last.
  std::vector<PartTensor> TakeParts();

 private:
  const TensorStore& store_;
  std::string base_;
  std::vector<PartTensor> parts_;
  std::vector<PartTensor> unused_;
};

/// A record of a plain or stacked matrix, with its layer class.
ModuleRecord RecordOf(const std::string& name, const WeightsSpec& spec);

/// The format of integer codes of 2 to 8 bits, `is_unsigned` or around 0: 2 and 3 bits are around 0
/// in any case, 7 bits are held in 8.
Format IntegerFormat(int bits, bool is_unsigned);

/// The types of scales and other parameters that are stored as they are.
inline constexpr std::initializer_list<DType> kFloatTypes = {DType::kF16, DType::kBf16,
                                                             DType::kF32};

/// The scale type with which 16- and 32-bit floats are stored as they are; nothing for others.
std::optional<ScaleType> ScaleTypeOf(DType dtype);

/// Tensor names with this suffix, without it, in name order.
std::vector<std::string> BasesWithSuffix(const TensorStore& store, std::string_view suffix);

}  // namespace marlin
