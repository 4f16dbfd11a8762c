#include "checkpoint/listed_reader.h"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/macros.h"
#include "base/printable.h"
#include "layout/input_transform.h"
#include "marlin/recipe.h"

namespace marlin {

Result<std::unique_ptr<const ModuleReader>> ListedReader::Open(
    const TensorStore& store, FunctionRef<Status(ListedReader* reader)> add) {
  auto reader = std::make_unique<ListedReader>(store);
  MARLIN_RETURN_IF_ERROR(add(reader.get()));
  MARLIN_RETURN_IF_ERROR(reader->Finish());
  return std::unique_ptr<const ModuleReader>(std::move(reader));
}

void ListedReader::Add(ModuleRecord record, std::vector<PartTensor> parts, Fill fill) {
  entries_.push_back({std::move(record), std::move(parts), std::move(fill)});
}

Status ListedReader::RotateLast(int64_t hadamard) {
  QuantizedModule& module = entries_.back().record.module;
  module.spec.input_hadamard = hadamard;
  const Status possible = CheckInputTransform(module.spec);
  if (possible.ok()) return {};
  return Status(Code::kUnsupported, fmt::format("{}: module \"{}\": {}", Printable(store_.path),
                                                Printable(module.name), possible.message()));
}

Status ListedReader::Finish() {
  const auto name_of = [](const Entry& entry) -> const std::string& {
    return entry.record.module.name;
  };
  std::sort(entries_.begin(), entries_.end(),
            [&](const Entry& a, const Entry& b) { return name_of(a) < name_of(b); });
  std::unordered_map<size_t, const Entry*> owners;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    const auto malformed = [&](const std::string& message) {
      return Status(Code::kMalformedFile,
                    fmt::format("{}: module \"{}\": {}", Printable(store_.path),
                                Printable(name_of(entry)), message));
    };
    if (i > 0 && name_of(entries_[i - 1]) == name_of(entry)) {
      return malformed("stored twice, under two spellings");
    }
    if (const Status spec = CheckSpec(entry.record.module.spec); !spec.ok()) {
      return malformed(std::string(spec.message()));
    }
    for (const PartTensor& part : entry.parts) {
      const auto [owner, inserted] = owners.emplace(part.tensor, &entry);
      if (inserted || owner->second == &entry) continue;
      return malformed(fmt::format("tensor \"{}\" belongs to module \"{}\" too",
                                   Printable(store_.tensors[part.tensor].name),
                                   Printable(name_of(*owner->second))));
    }
    modules_.push_back(entry.record);
  }
  for (const Entry& entry : entries_) {
    const std::optional<size_t> plain = store_.FindTensor(name_of(entry));
    if (!plain || owners.contains(*plain)) continue;
    return Status(Code::kMalformedFile,
                  fmt::format("{}: tensor \"{}\" is stored both plain and quantized",
                              Printable(store_.path), Printable(name_of(entry))));
  }
  return CheckRest(owners);
}

// Codes that no module holds would be taken for plain numbers.
Status ListedReader::CheckRest(const std::unordered_map<size_t, const Entry*>& owners) const {
  constexpr DType kCodeTypes[] = {DType::kI8,  DType::kI16,    DType::kI32,   DType::kU8,
                                  DType::kU32, DType::kF8E4M3, DType::kF8E5M2};
  for (size_t i = 0; i < store_.tensors.size(); ++i) {
    const TensorInfo& tensor = store_.tensors[i];
    const bool codes = std::find(std::begin(kCodeTypes), std::end(kCodeTypes), tensor.dtype) !=
                       std::end(kCodeTypes);
    // Attention masks, which some checkpoints store, are named as biases.
    if (!codes || tensor.shape.rank() < 2 || tensor.name.ends_with(".bias")) continue;
    if (owners.contains(i)) continue;
    return Status(Code::kUnsupported,
                  fmt::format("{}: tensor \"{}\", {} {}, is a part of no quantized module",
                              Printable(store_.path), Printable(tensor.name),
                              DTypeName(tensor.dtype), tensor.shape.ToString()));
  }
  return {};
}

const ListedReader::Entry* ListedReader::Find(const ModuleRecord& record) const {
  const auto found = std::lower_bound(
      entries_.begin(), entries_.end(), record.module.name,
      [](const Entry& entry, const std::string& name) { return entry.record.module.name < name; });
  const bool same = found != entries_.end() && found->record.module.name == record.module.name;
  return same ? &*found : nullptr;
}

std::vector<PartTensor> ListedReader::Parts(const ModuleRecord& record) const {
  const Entry* entry = Find(record);
  return entry == nullptr ? std::vector<PartTensor>() : entry->parts;
}

Result<QuantizedWeights> ListedReader::Load(const ModuleRecord& record) const {
  const Entry* entry = Find(record);
  if (entry == nullptr) return Status(Code::kInternal, "a module of another reader");
  MARLIN_ASSIGN_OR_RETURN(WeightsBuffer buffer, AllocateWeights(record.module.spec));
  MARLIN_RETURN_IF_ERROR(entry->fill(&buffer, pool_.Get()));
  return std::move(buffer.weights);
}

const TensorInfo* ModuleTensorFinder::Look(std::string_view suffix) const {
  const std::optional<size_t> found = store_.FindTensor(base_ + std::string(suffix));
  return found ? &store_.tensors[*found] : nullptr;
}

bool ModuleTensorFinder::Has(std::string_view suffix) const { return Look(suffix) != nullptr; }

Status ModuleTensorFinder::Malformed(std::string_view suffix, const std::string& message) const {
  return Status(Code::kMalformedFile, fmt::format("{}: tensor \"{}\": {}", Printable(store_.path),
                                                  Printable(base_ + std::string(suffix)), message));
}

Status ModuleTensorFinder::Unsupported(const std::string& message) const {
  return Status(Code::kUnsupported, fmt::format("{}: module \"{}\": {}", Printable(store_.path),
                                                Printable(base_), message));
}

Result<size_t> ModuleTensorFinder::Need(ModulePart part, std::string_view suffix,
                                        std::initializer_list<DType> dtypes) {
  const std::optional<size_t> found = store_.FindTensor(base_ + std::string(suffix));
  if (!found) return Malformed(suffix, "is missing");
  const DType dtype = store_.tensors[*found].dtype;
  if (std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) {
    std::string expected;
    for (const DType possible : dtypes) {
      expected += (expected.empty() ? "" : " or ") + std::string(DTypeName(possible));
    }
    return Malformed(suffix, fmt::format("expected {}, got {}", expected, DTypeName(dtype)));
  }
  parts_.push_back({part, *found});
  return *found;
}

Result<size_t> ModuleTensorFinder::Need(ModulePart part, std::string_view suffix,
                                        std::initializer_list<DType> dtypes, const Shape& shape) {
  MARLIN_ASSIGN_OR_RETURN(const size_t tensor, Need(part, suffix, dtypes));
  if (!(ShapeOf(tensor) == shape)) {
    return Malformed(
        suffix, fmt::format("expected {}, got {}", shape.ToString(), ShapeOf(tensor).ToString()));
  }
  return tensor;
}

void ModuleTensorFinder::TakeUnused(std::initializer_list<std::string_view> suffixes) {
  for (const std::string_view suffix : suffixes) {
    const std::optional<size_t> found = store_.FindTensor(base_ + std::string(suffix));
    if (found) unused_.push_back({ModulePart::kCodes, *found});
  }
}

std::vector<PartTensor> ModuleTensorFinder::TakeParts() {
  std::stable_partition(parts_.begin(), parts_.end(),
                        [](const PartTensor& part) { return part.part == ModulePart::kCodes; });
  parts_.insert(parts_.end(), unused_.begin(), unused_.end());
  return std::move(parts_);
}

ModuleRecord RecordOf(const std::string& name, const WeightsSpec& spec) {
  ModuleRecord record;
  record.module = {name, spec, ClassifyTensor(name)};
  record.stacked = spec.experts > 1 || name.find(".*.") != std::string::npos;
  return record;
}

Format IntegerFormat(int bits, bool is_unsigned) {
  switch (bits) {
    case 2:
      return Format::kInt2;
    case 3:
      return Format::kInt3;
    case 4:
      return is_unsigned ? Format::kU4 : Format::kS4;
    case 5:
      return is_unsigned ? Format::kU5 : Format::kInt5;
    case 6:
      return is_unsigned ? Format::kU6 : Format::kInt6;
    default:
      return is_unsigned ? Format::kU8 : Format::kS8;
  }
}

std::optional<ScaleType> ScaleTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return ScaleType::kF16;
    case DType::kBf16:
      return ScaleType::kBf16;
    case DType::kF32:
      return ScaleType::kF32;
    default:
      return std::nullopt;
  }
}

std::vector<std::string> BasesWithSuffix(const TensorStore& store, std::string_view suffix) {
  std::vector<std::string> bases;
  for (const TensorInfo& tensor : store.tensors) {
    if (!tensor.name.ends_with(suffix)) continue;
    bases.push_back(tensor.name.substr(0, tensor.name.size() - suffix.size()));
  }
  return bases;
}

}  // namespace marlin
