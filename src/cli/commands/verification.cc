#include "cli/commands/verification.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/scalars.h"
#include "base/thread_pool.h"
#include "base/view_checks.h"
#include "checkpoint/checkpoint_impl.h"
#include "cli/checkpoint_listing.h"
#include "layout/slice_expert.h"
#include "marlin/quantize.h"

namespace marlin::cli {
namespace {

/// One element of a tensor in a file, which may be unaligned.
float LoadElement(const std::byte* data, DType dtype, int64_t index) {
  if (dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, data + 4 * index, 4);
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, data + 2 * index, 2);
  return dtype == DType::kBf16 ? Bf16ToFloat(bits) : HalfToFloat(bits);
}

/// Compares rows of equal length; the sums are independent of the number of threads.
template <typename LoadA, typename LoadB>
ErrorSums CompareRows(ThreadPool& pool, int64_t rows, int64_t columns, LoadA expected,
                      LoadB actual) {
  std::vector<ErrorSums> sums(static_cast<size_t>(rows));
  pool.Run(rows, [&](int64_t row, int) {
    ErrorSums& sum = sums[static_cast<size_t>(row)];
    for (int64_t i = row * columns; i < (row + 1) * columns; ++i) {
      const double weight = expected(i);
      const double error = actual(i) - weight;
      sum.weight_squares += weight * weight;
      sum.error_squares += error * error;
      // The comparison is written so that NaN is kept.
      if (!(std::abs(error) <= sum.max_error)) sum.max_error = std::abs(error);
    }
    sum.parameters = columns;
  });
  ErrorSums total;
  for (const ErrorSums& sum : sums) total.Add(sum);
  return total;
}

class Comparer {
 public:
  Comparer(const Checkpoint& quantized, const Checkpoint& source, const Progress& progress)
      : quantized_(quantized), source_(source), progress_(progress), pool_(0) {}

  Result<Comparison> Run() {
    for (const TensorInfo& tensor : source_.tensors()) total_ += tensor.shape.ElementCount();
    const auto& records = CheckpointAccess::Get(quantized_).reader->modules();
    for (const ModuleRecord& record : records) MARLIN_RETURN_IF_ERROR(CompareModule(record));
    for (const TensorInfo& tensor : quantized_.tensors()) {
      if (!quantized_.IsModulePart(tensor.name)) MARLIN_RETURN_IF_ERROR(ComparePlain(tensor));
    }
    for (const TensorInfo& tensor : source_.tensors()) {
      if (seen_.contains(tensor.name)) continue;
      return Malformed(tensor.name, fmt::format("is in {} only", source_.path()));
    }
    return std::move(comparison_);
  }

 private:
  static Status Malformed(const std::string& name, const std::string& reason) {
    return Status(Code::kMalformedFile, fmt::format("{}: {}", Printable(name), reason));
  }

  void Advance(int64_t parameters) {
    done_ += parameters;
    if (progress_) progress_(done_, total_);
  }

  Result<TensorView> SourceTensor(const std::string& name, const Shape& expected) {
    const TensorInfo* info = source_.Find(name);
    if (info == nullptr) return Malformed(name, fmt::format("is not in {}", source_.path()));
    if (!(info->shape == expected)) {
      return Malformed(name, fmt::format("{} in the source, {} in the quantized checkpoint",
                                         info->shape.ToString(), expected.ToString()));
    }
    seen_.insert(name);
    return source_.Tensor(name);
  }

  void Add(TensorComparison tensor) {
    comparison_.classes[static_cast<size_t>(tensor.layer_class)].Add(tensor.errors);
    comparison_.total.Add(tensor.errors);
    comparison_.tensors.push_back(std::move(tensor));
  }

  Status CompareModule(const ModuleRecord& record) {
    const QuantizedModule& module = record.module;
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights, quantized_.Weights(module.name));
    TensorComparison result;
    result.name = module.name;
    result.format = FormatName(module.spec.format);
    result.layer_class = module.layer_class;
    const bool out_in = record.layout == SourceLayout::kOutIn;
    const Shape matrix =
        out_in ? Shape{module.spec.n, module.spec.k} : Shape{module.spec.k, module.spec.n};
    const size_t star = module.name.find('*');
    Shape stack;
    stack.Append(module.spec.experts);
    stack.Append(matrix[0]);
    stack.Append(matrix[1]);
    const bool fused = record.stacked && star == std::string::npos;
    for (int64_t expert = 0; expert < module.spec.experts; ++expert) {
      std::string name = module.name;
      if (star != std::string::npos) name.replace(star, 1, std::to_string(expert));
      MARLIN_ASSIGN_OR_RETURN(TensorView view, SourceTensor(name, fused ? stack : matrix));
      if (fused) {
        const auto* data = static_cast<const std::byte*>(view.data());
        view = TensorView(data + expert * matrix.ElementCount() * DTypeBytes(view.dtype()),
                          view.dtype(), matrix);
      }
      MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights one, SliceExpert(weights, expert));
      const Result<ErrorSums> compared = CompareMatrix(one, view, out_in);
      if (!compared.ok()) return compared.status().WithContext(Printable(name));
      const ErrorSums& errors = *compared;
      result.errors.Add(errors);
      Advance(errors.parameters);
    }
    Add(std::move(result));
    return Status();
  }

  Result<ErrorSums> CompareMatrix(const QuantizedWeights& weights, const TensorView& source,
                                  bool out_in) {
    if (!IsFloat(source.dtype())) {
      return Status(Code::kUnsupported,
                    fmt::format("comparing with {} is not supported", DTypeName(source.dtype())));
    }
    const int64_t rows = source.dim(0);
    const int64_t columns = source.dim(1);
    const int64_t bytes = rows * columns * 4;
    if (buffer_.size() < bytes) {
      MARLIN_ASSIGN_OR_RETURN(buffer_, AlignedBuffer::Allocate(bytes));
    }
    auto* dense = buffer_.As<float>();
    // Dequantize in the source's order, so that both are read along rows.
    const MutableTensorView out =
        out_in ? MutableTensorView(dense, DType::kF32, {columns, rows}, {1, columns})
               : MutableTensorView(dense, DType::kF32, {rows, columns});
    MARLIN_RETURN_IF_ERROR(Dequantize(weights, out));
    const auto* data = static_cast<const std::byte*>(source.data());
    const DType dtype = source.dtype();
    return CompareRows(
        pool_, rows, columns, [=](int64_t i) { return LoadElement(data, dtype, i); },
        [=](int64_t i) { return dense[i]; });
  }

  Status ComparePlain(const TensorInfo& tensor) {
    MARLIN_ASSIGN_OR_RETURN(const TensorView expected, SourceTensor(tensor.name, tensor.shape));
    MARLIN_ASSIGN_OR_RETURN(const TensorView actual, quantized_.Tensor(tensor.name));
    TensorComparison result;
    result.name = tensor.name;
    result.format = DTypeName(tensor.dtype);
    result.layer_class = ClassifyTensor(tensor.name);
    const int64_t count = tensor.shape.ElementCount();
    const auto* a = static_cast<const std::byte*>(expected.data());
    const auto* b = static_cast<const std::byte*>(actual.data());
    const DType type_a = expected.dtype();
    const DType type_b = actual.dtype();
    if (IsFloat(type_a) && IsFloat(type_b)) {
      // Other dimensions of an empty tensor are unbounded, so do not loop over them.
      const bool one_row = tensor.shape.rank() == 0 || count == 0;
      const int64_t rows = one_row ? 1 : tensor.shape[0];
      result.errors = CompareRows(
          pool_, rows, count / rows, [=](int64_t i) { return LoadElement(a, type_a, i); },
          [=](int64_t i) { return LoadElement(b, type_b, i); });
    } else if (type_a != type_b ||
               (count > 0 && std::memcmp(a, b, static_cast<size_t>(expected.ByteCount())) != 0)) {
      return Malformed(tensor.name,
                       fmt::format("{} in the source and {} in the quantized checkpoint "
                                   "differ",
                                   DTypeName(type_a), DTypeName(type_b)));
    }
    Advance(count);
    Add(std::move(result));
    return Status();
  }

  const Checkpoint& quantized_;
  const Checkpoint& source_;
  const Progress& progress_;
  ThreadPool pool_;
  AlignedBuffer buffer_;
  std::set<std::string> seen_;
  Comparison comparison_;
  int64_t done_ = 0;
  int64_t total_ = 0;
};

}  // namespace

void ErrorSums::Add(const ErrorSums& other) {
  weight_squares += other.weight_squares;
  error_squares += other.error_squares;
  if (!(other.max_error <= max_error)) max_error = other.max_error;
  parameters += other.parameters;
}

double ErrorSums::RelativeError() const {
  return error_squares == 0 ? 0.0 : std::sqrt(error_squares / weight_squares);
}

double ErrorSums::SqnrDb() const {
  if (error_squares == 0) return std::numeric_limits<double>::infinity();
  return 10.0 * std::log10(weight_squares / error_squares);
}

const TensorComparison* Comparison::Worst() const {
  const TensorComparison* worst = nullptr;
  for (const TensorComparison& tensor : tensors) {
    // A NaN is worse than any number.
    if (worst == nullptr || !(tensor.errors.RelativeError() <= worst->errors.RelativeError())) {
      worst = &tensor;
    }
  }
  return worst;
}

namespace {

/// A method that multiplies tensors leaves none to compare, although the model computes the same.
Status CheckUnscaled(const Checkpoint& quantized) {
  if (!quantized.quantized()) return {};
  const Json& config = CheckpointAccess::Get(quantized).config();
  const std::string method = config.at("quantization_config").value("method", "");
  if (!method.starts_with("awq")) return {};
  return {Code::kUnsupported,
          fmt::format("{}: method {} scaled the inputs of its matrices, which are no longer those "
                      "of the source; compare predictions: metal-marlin compare",
                      Printable(quantized.path()), Printable(method))};
}

}  // namespace

Result<Comparison> CompareCheckpoints(const Checkpoint& quantized, const Checkpoint& source,
                                      const Progress& progress) {
  MARLIN_RETURN_IF_ERROR(CheckUnscaled(quantized));
  if (quantized.quant_method().empty()) {
    return Invalid(fmt::format("{}: is not a quantized checkpoint", quantized.path()));
  }
  return Comparer(quantized, source, progress).Run();
}

}  // namespace marlin::cli
