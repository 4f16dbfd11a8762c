#include "marlin/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/checksum.h"

namespace marlin {
namespace {

constexpr int64_t kViewAlignment = 4;  // What QuantizedWeights promises of its views.

Status UnknownName(const Checkpoint::Impl& impl, std::string_view what, const std::string& name) {
  return Status(Code::kInvalidArgument,
                fmt::format("{}: no {} \"{}\"", Printable(impl.path), what, Printable(name)));
}

const std::byte* TensorData(const Checkpoint::Impl& impl, size_t tensor) {
  const Mapping& mapping = *impl.files[impl.tensor_file[tensor]].mapping;
  return mapping.data() + impl.tensors[tensor].offset;
}

// Keeps the mapping alive for views into it, and holds what had to be copied to be aligned.
struct LoadedModule {
  std::shared_ptr<const Checkpoint::Impl> checkpoint;
  std::vector<AlignedBuffer> copies;
};

Result<const std::byte*> AlignedData(const Checkpoint::Impl& impl, size_t tensor,
                                     LoadedModule* loaded) {
  const std::byte* data = TensorData(impl, tensor);
  if (reinterpret_cast<uintptr_t>(data) % kViewAlignment == 0) return data;
  const int64_t bytes = impl.tensors[tensor].bytes;
  MARLIN_ASSIGN_OR_RETURN(AlignedBuffer copy, AlignedBuffer::Allocate(bytes));
  if (bytes > 0) std::memcpy(copy.data(), data, static_cast<size_t>(bytes));
  loaded->copies.push_back(std::move(copy));
  return loaded->copies.back().data();
}

// A codebook equal to the built-in one is left out, so that kernels need not compare tables.
std::vector<float> ReadCodebook(Format format, const std::byte* data) {
  const std::span<const float> built_in = FormatValues(format);
  std::vector<float> codebook(built_in.size());
  std::memcpy(codebook.data(), data, codebook.size() * sizeof(float));
  const bool same =
      std::memcmp(codebook.data(), built_in.data(), codebook.size() * sizeof(float)) == 0;
  return same ? std::vector<float>() : codebook;
}

Status AttachPart(const ModuleTensor& part, const std::byte* data, QuantizedWeights* weights) {
  const WeightsSpec& spec = weights->spec;
  const auto stacked = [&](int64_t rows) {
    return TensorView(data, part.dtype, {spec.experts, rows, spec.n});
  };
  switch (part.part) {
    case ModulePart::kCodes:
      weights->codes = stacked(WordsAlongK(spec.format, spec.k));
      return {};
    case ModulePart::kScales:
      weights->scales = stacked(GroupCount(spec));
      return {};
    case ModulePart::kZeros:
      weights->zeros = stacked(GroupCount(spec));
      return {};
    case ModulePart::kBiases:
      weights->biases = stacked(GroupCount(spec));
      return {};
    case ModulePart::kGlobalScale:
      weights->global_scale = TensorView(data, part.dtype, {spec.experts});
      return {};
    case ModulePart::kCodebook:
      weights->codebook = ReadCodebook(spec.format, data);
      return {};
  }
  return Status(Code::kInternal, "unknown part of a module");
}

// An error of Validate, which names a part, as one of the part's tensor.
Status NameTensor(const Checkpoint::Impl& impl, const ModuleRecord& record, const Status& error) {
  // In the order of ModulePart.
  constexpr std::array<std::string_view, 6> kPartNames = {"codes",  "scales",       "zeros",
                                                          "biases", "global_scale", "codebook"};
  // The spec was checked at opening: what Validate still finds is wrong with the content.
  const Code code = error.code() == Code::kOutOfMemory ? error.code() : Code::kMalformedFile;
  const std::string_view message = error.message();
  const std::string_view part_name = message.substr(0, message.find(": "));
  for (const ModuleTensor& part : ModuleTensors(record)) {
    if (part_name != kPartNames[static_cast<size_t>(part.part)]) continue;
    const TensorInfo& tensor = impl.tensors[*impl.FindTensor(part.name)];
    return Status(code,
                  fmt::format("{}: {}: tensor \"{}\" of module \"{}\": {}", Printable(impl.path),
                              Printable(tensor.file), Printable(tensor.name),
                              Printable(record.module.name), message.substr(part_name.size() + 2)));
  }
  return Status(code, fmt::format("{}: module \"{}\": {}", Printable(impl.path),
                                  Printable(record.module.name), message));
}

Result<QuantizedWeights> LoadModule(const std::shared_ptr<const Checkpoint::Impl>& impl,
                                    const ModuleRecord& record) {
  auto loaded = std::make_shared<LoadedModule>();
  loaded->checkpoint = impl;
  QuantizedWeights weights;
  weights.spec = record.module.spec;
  for (const ModuleTensor& part : ModuleTensors(record)) {
    const size_t tensor = *impl->FindTensor(part.name);  // CheckModuleTensors found all of them.
    MARLIN_ASSIGN_OR_RETURN(const std::byte* data, AlignedData(*impl, tensor, loaded.get()));
    MARLIN_RETURN_IF_ERROR(AttachPart(part, data, &weights));
  }
  weights.owner = std::move(loaded);
  MARLIN_RETURN_IF_ERROR(Validate(weights));
  return weights;
}

}  // namespace

Result<Checkpoint> Checkpoint::Open(const std::string& path) {
  SystemIo io;
  return CheckpointAccess::Open(io, path);
}

const std::string& Checkpoint::path() const { return impl_->path; }
const std::vector<TensorInfo>& Checkpoint::tensors() const { return impl_->tensors; }
const std::string& Checkpoint::config_json() const { return impl_->config_json; }
bool Checkpoint::quantized() const { return impl_->quantized; }
const std::string& Checkpoint::recipe_name() const { return impl_->quantization.recipe_name; }
const std::vector<QuantizedModule>& Checkpoint::modules() const { return impl_->modules; }

const TensorInfo* Checkpoint::Find(const std::string& name) const {
  const std::optional<size_t> found = impl_->FindTensor(name);
  return found ? &impl_->tensors[*found] : nullptr;
}

Result<TensorView> Checkpoint::Tensor(const std::string& name) const {
  const std::optional<size_t> found = impl_->FindTensor(name);
  if (!found) return UnknownName(*impl_, "tensor", name);
  const TensorInfo& tensor = impl_->tensors[*found];
  return TensorView(TensorData(*impl_, *found), tensor.dtype, tensor.shape);
}

Result<QuantizedWeights> Checkpoint::Weights(const std::string& module_name) const {
  const auto found = impl_->module_index.find(module_name);
  if (found == impl_->module_index.end()) return UnknownName(*impl_, "module", module_name);
  try {
    const ModuleRecord& record = impl_->quantization.modules[found->second];
    Result<QuantizedWeights> weights = LoadModule(impl_, record);
    if (weights.ok()) return weights;
    return NameTensor(*impl_, record, weights.status());
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, Printable(impl_->path) + ": no memory for a module");
  }
}

Status Checkpoint::VerifyChecksums() const {
  for (size_t i = 0; i < impl_->tensors.size(); ++i) {
    const TensorInfo& tensor = impl_->tensors[i];
    const auto fail = [&](const std::string& message) {
      return Status(Code::kMalformedFile,
                    fmt::format("{}: {}: tensor \"{}\": {}", Printable(impl_->path),
                                Printable(tensor.file), Printable(tensor.name), message));
    };
    if (!impl_->checksums[i]) return fail("no checksum is stored");
    const uint64_t actual = ChecksumOf(
        {reinterpret_cast<const char*>(TensorData(*impl_, i)), static_cast<size_t>(tensor.bytes)});
    impl_->files[impl_->tensor_file[i]].mapping->Release(tensor.offset, tensor.bytes);
    if (actual != *impl_->checksums[i]) {
      return fail(fmt::format("its {} bytes have checksum {}, stored is {}", tensor.bytes,
                              ChecksumText(actual), ChecksumText(*impl_->checksums[i])));
    }
  }
  // A writer's checksums can be right for values that nothing loads.
  for (const ModuleRecord& record : impl_->quantization.modules) {
    MARLIN_RETURN_IF_ERROR(Weights(record.module.name).status());
    for (const ModuleTensor& part : ModuleTensors(record)) {
      const size_t tensor = *impl_->FindTensor(part.name);
      const TensorInfo& info = impl_->tensors[tensor];
      impl_->files[impl_->tensor_file[tensor]].mapping->Release(info.offset, info.bytes);
    }
  }
  return {};
}

}  // namespace marlin
