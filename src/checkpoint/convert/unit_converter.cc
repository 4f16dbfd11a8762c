#include "checkpoint/convert/unit_converter.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/decoder_names.h"
#include "layout/slice_expert.h"
#include "marlin/quantize.h"

namespace marlin {
namespace {

constexpr std::string_view kWildcard = ".*.";

}  // namespace

bool HasExpertNames(const ModuleRecord& record) {
  return record.module.name.find(kWildcard) != std::string::npos;
}

std::string NameWithExpert(std::string_view module_name, int64_t expert) {
  const size_t star = module_name.find(kWildcard) + 1;
  return fmt::format("{}{}{}", module_name.substr(0, star), expert, module_name.substr(star + 1));
}

Shape StoredShape(const ModuleRecord& record) {
  const WeightsSpec& spec = record.module.spec;
  return record.layout == SourceLayout::kOutIn ? Shape{spec.n, spec.k} : Shape{spec.k, spec.n};
}

Status CheckShardBytes(int64_t shard_bytes) {
  if (shard_bytes >= 1) return {};
  return Status(Code::kInvalidArgument,
                fmt::format("shard_bytes: expected at least 1, got {}", shard_bytes));
}

Status UnitConverter::InModule(const ModuleRecord& record, const Status& status) const {
  return status.WithContext(
      fmt::format("{}: module \"{}\"", Printable(source_.path), Printable(record.module.name)));
}

void UnitConverter::Advance(int64_t parameters) {
  done_ += parameters;
  if (progress_) progress_(done_, parameters_);
}

void UnitConverter::AddUnit(const ModuleRecord& record, int64_t first_expert, int64_t count,
                            OutputUnit outputs) {
  SourceUnit unit;
  unit.record = &record;
  unit.first_expert = first_expert;
  unit.experts = count;
  unit.tensor = source_.reader->Parts(record).front().tensor;
  unit.outputs = std::move(outputs);
  for (OutputTensor& tensor : unit.outputs) {
    tensor.bytes = tensor.shape.ElementCount() * DTypeBytes(tensor.dtype);
    tensor.name = StoredName(source_, tensor.name);
  }
  unit.parameters = count * record.module.spec.k * record.module.spec.n;
  units_.push_back(std::move(unit));
}

void UnitConverter::AddDense(const ModuleRecord& record, DType dtype) {
  const std::string& name = record.module.name;
  const int64_t experts = record.module.spec.experts;
  const Shape matrix = StoredShape(record);
  if (!HasExpertNames(record)) {
    const Shape shape = record.stacked ? Shape{experts, matrix[0], matrix[1]} : matrix;
    return AddUnit(record, 0, experts, {{name, dtype, shape}});
  }
  for (int64_t e = 0; e < experts; ++e) {
    AddUnit(record, e, 1, {{NameWithExpert(name, e), dtype, matrix}});
  }
}

Status UnitConverter::Plan() {
  for (const ModuleRecord& record : source_.reader->modules()) {
    MARLIN_RETURN_IF_ERROR(PlanModule(record));
  }
  for (size_t i = 0; i < source_.tensors.size(); ++i) {
    if (source_.is_part[i]) continue;
    const TensorInfo& tensor = source_.tensors[i];
    PlanCopy(tensor);
    SourceUnit unit;
    unit.tensor = i;
    unit.outputs = {{StoredName(source_, tensor.name), tensor.dtype, tensor.shape, tensor.bytes}};
    unit.parameters = tensor.shape.ElementCount();
    units_.push_back(std::move(unit));
  }
  for (const SourceUnit& unit : units_) parameters_ += unit.parameters;
  // In file order, so that every file is read once, front to back.
  const auto place = [this](const SourceUnit& unit) {
    return std::pair(source_.tensor_file[unit.tensor], source_.tensors[unit.tensor].offset);
  };
  std::stable_sort(
      units_.begin(), units_.end(),
      [&place](const SourceUnit& a, const SourceUnit& b) { return place(a) < place(b); });
  return {};
}

void UnitConverter::Attach(Conversion* conversion) {
  for (const SourceUnit& unit : units_) conversion->units.push_back(unit.outputs);
  conversion->write_unit = [this](TensorWriter* writer, size_t unit) -> Result<int64_t> {
    MARLIN_RETURN_IF_ERROR(Write(writer, unit));
    return 0;
  };
}

Result<QuantizedWeights> UnitConverter::LoadModule(const ModuleRecord& record) {
  return checkpoint_.Weights(record.module.name);
}

Status UnitConverter::Load(const ModuleRecord& record) {
  if (loaded_ == &record) return {};
  weights_ = {};
  if (loaded_ != nullptr) {
    for (const PartTensor& part : source_.reader->Parts(*loaded_)) source_.Release(part.tensor);
  }
  loaded_ = nullptr;
  MARLIN_ASSIGN_OR_RETURN(weights_, LoadModule(record));
  loaded_ = &record;
  return {};
}

Status UnitConverter::Write(TensorWriter* writer, size_t index) {
  const SourceUnit& unit = units_[index];
  if (unit.record != nullptr) {
    MARLIN_RETURN_IF_ERROR(Load(*unit.record));
    return WriteModule(writer, index, weights_);
  }
  MARLIN_RETURN_IF_ERROR(CopyTensor(source_, unit.tensor, index, writer));
  Advance(unit.parameters);
  return {};
}

Status UnitConverter::WriteModule(TensorWriter* writer, size_t unit,
                                  const QuantizedWeights& weights) {
  const int64_t first = units_[unit].first_expert;
  for (int64_t e = first; e < first + units_[unit].experts; ++e) {
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights expert, SliceExpert(weights, e));
    MARLIN_RETURN_IF_ERROR(WriteExpert(writer, unit, expert, e));
    Advance(expert.spec.k * expert.spec.n);
  }
  return {};
}

Result<AlignedBuffer> UnitConverter::MakeDense(const ModuleRecord& record,
                                               const QuantizedWeights& expert, DType dtype) const {
  const Shape shape = StoredShape(record);
  MARLIN_ASSIGN_OR_RETURN(AlignedBuffer dense,
                          AlignedBuffer::Allocate(shape.ElementCount() * DTypeBytes(dtype)));
  const MutableTensorView stored(dense.data(), dtype, shape);
  const bool out_in = record.layout == SourceLayout::kOutIn;
  const Status status = Dequantize(expert, out_in ? stored.Transposed() : stored);
  if (!status.ok()) return InModule(record, status);
  return dense;
}

}  // namespace marlin
