#include "marlin/checkpoint.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <new>

#include "base/macros.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/files/checksum.h"
#include "checkpoint/files/model_directory.h"
#include "checkpoint/files/verify_checksums.h"

namespace marlin {
namespace {

Status UnknownName(const Checkpoint::Impl& impl, std::string_view what, const std::string& name) {
  return Status(Code::kInvalidArgument,
                fmt::format("{}: no {} \"{}\"", Printable(impl.path), what, Printable(name)));
}

// Rewrites an error of Validate, which names a part, to name the part's tensor.
Status NameTensor(const Checkpoint::Impl& impl, const ModuleRecord& record, const Status& error) {
  // In the order of ModulePart.
  constexpr std::array<std::string_view, 11> kPartNames = {
      "codes",    "scales",      "zeros",       "biases",       "global_scale", "codebook",
      "metadata", "permutation", "input_scale", "super_scales", "super_biases"};
  static_assert(kPartNames.size() == static_cast<size_t>(ModulePart::kSuperBiases) + 1);
  // The spec was checked at opening: any error that Validate still finds is in the content.
  const Code code = error.code() == Code::kOutOfMemory ? error.code() : Code::kMalformedFile;
  const std::string_view message = error.message();
  const std::string_view part_name = message.substr(0, message.find(": "));
  for (const PartTensor& part : impl.reader->Parts(record)) {
    if (part_name != kPartNames[static_cast<size_t>(part.part)]) continue;
    const TensorInfo& tensor = impl.tensors[part.tensor];
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
  // Keeps alive the mappings that the views point into.
  struct Owner {
    std::shared_ptr<const Checkpoint::Impl> checkpoint;
    std::shared_ptr<const void> copies;
  };
  MARLIN_ASSIGN_OR_RETURN(QuantizedWeights weights, impl->reader->Load(record));
  weights.owner = std::make_shared<const Owner>(Owner{impl, std::move(weights.owner)});
  MARLIN_RETURN_IF_ERROR(Validate(weights));
  return weights;
}

}  // namespace

Result<Checkpoint> Checkpoint::Open(const std::string& path, const CheckpointOptions& options) {
  SystemIo io;
  return CheckpointAccess::Open(io, path, options);
}

const std::string& Checkpoint::path() const { return impl_->path; }
const std::vector<TensorInfo>& Checkpoint::tensors() const { return impl_->tensors; }
const std::string& Checkpoint::config_json() const { return impl_->config_json; }
const std::vector<std::string>& Checkpoint::notes() const { return impl_->notes; }
bool Checkpoint::quantized() const { return impl_->quantized(); }
const std::string& Checkpoint::quant_method() const { return impl_->quant_method; }
const std::string& Checkpoint::recipe_name() const { return impl_->reader->recipe_name(); }
const std::vector<QuantizedModule>& Checkpoint::modules() const { return impl_->modules; }

const TensorInfo* Checkpoint::Find(const std::string& name) const {
  const std::optional<size_t> found = impl_->FindTensor(name);
  return found ? &impl_->tensors[*found] : nullptr;
}

Result<TensorView> Checkpoint::Tensor(const std::string& name) const {
  const std::optional<size_t> found = impl_->FindTensor(name);
  if (!found) return UnknownName(*impl_, "tensor", name);
  const TensorInfo& tensor = impl_->tensors[*found];
  const auto computed = impl_->computed.find(*found);
  if (computed == impl_->computed.end()) {
    return TensorView(impl_->Data(*found), tensor.dtype, tensor.shape);
  }
  const std::scoped_lock lock(impl_->computed_mutex);
  auto data = impl_->computed_data.find(*found);
  if (data == impl_->computed_data.end()) {
    MARLIN_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Allocate(tensor.bytes));
    computed->second(buffer.data());
    data = impl_->computed_data.emplace(*found, std::move(buffer)).first;
  }
  return TensorView(data->second.data(), tensor.dtype, tensor.shape);
}

void Checkpoint::Impl::ForgetComputed() const {
  const std::scoped_lock lock(computed_mutex);
  computed_data.clear();
}

bool Checkpoint::IsModulePart(const std::string& tensor_name) const {
  const std::optional<size_t> found = impl_->FindTensor(tensor_name);
  return found && impl_->is_part[*found];
}

Result<QuantizedWeights> Checkpoint::Weights(const std::string& module_name) const {
  const auto found = impl_->module_index.find(module_name);
  if (found == impl_->module_index.end()) return UnknownName(*impl_, "module", module_name);
  try {
    const ModuleRecord& record = impl_->reader->modules()[found->second];
    Result<QuantizedWeights> weights = LoadModule(impl_, record);
    if (weights.ok()) return weights;
    return NameTensor(*impl_, record, weights.status());
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, Printable(impl_->path) + ": no memory for a module");
  }
}

Result<std::optional<std::string>> Checkpoint::ReadFile(const std::string& name) const {
  if (name.empty() || name.find('/') != std::string::npos) {
    return Status(Code::kInvalidArgument,
                  fmt::format("name: \"{}\" is not the name of a file", Printable(name)));
  }
  if (impl_->is_directory) {
    SystemIo io;
    MARLIN_RETURN_IF_ERROR(CheckModelFile(io, impl_->path, name));
    const std::string path = JoinPath(impl_->path, name);
    MARLIN_ASSIGN_OR_RETURN(const FileInfo info, io.Stat(path));
    if (info.kind != FileKind::kMissing) {
      MARLIN_ASSIGN_OR_RETURN(std::string text, io.ReadText(path, kMaxSideFileBytes));
      return std::optional<std::string>(std::move(text));
    }
  }
  std::optional<ContainedFile> file = impl_->reader->File(name);
  if (!file) return std::optional<std::string>();
  if (!file->obstacle.empty()) {
    return Status(Code::kUnsupported, fmt::format("{}: {}: {}", Printable(impl_->path),
                                                  Printable(name), file->obstacle));
  }
  return std::optional<std::string>(std::move(file->content));
}

Status Checkpoint::VerifyChecksums() const { return marlin::VerifyChecksums(*this, {}); }

Status VerifyChecksums(const Checkpoint& checkpoint, const Progress& progress) {
  const Checkpoint::Impl& impl = CheckpointAccess::Get(checkpoint);
  // Other programs store no checksums: what can be verified of their files are the values.
  const size_t checked = impl.quant_method.empty() || impl.quantized() ? impl.tensors.size() : 0;
  // Every checked tensor is read once, and the parts of modules are read once more.
  int64_t total = 0;
  int64_t done = 0;
  for (size_t i = 0; i < checked; ++i) total += impl.tensors[i].bytes;
  for (const ModuleRecord& record : impl.reader->modules()) {
    for (const PartTensor& part : impl.reader->Parts(record)) {
      total += impl.tensors[part.tensor].bytes;
    }
  }
  const auto advance = [&](int64_t bytes) {
    done += bytes;
    if (progress) progress(done, total);
  };
  for (size_t i = 0; i < checked; ++i) {
    const TensorInfo& tensor = impl.tensors[i];
    const auto fail = [&](const std::string& message) {
      return Status(Code::kMalformedFile,
                    fmt::format("{}: {}: tensor \"{}\": {}", Printable(impl.path),
                                Printable(tensor.file), Printable(tensor.name), message));
    };
    if (!impl.checksums[i]) return fail("no checksum is stored");
    const uint64_t actual = ChecksumOf(
        {reinterpret_cast<const char*>(impl.Data(i)), static_cast<size_t>(tensor.bytes)});
    impl.Release(i);
    if (actual != *impl.checksums[i]) {
      return fail(fmt::format("its {} bytes have checksum {}, stored is {}", tensor.bytes,
                              ChecksumText(actual), ChecksumText(*impl.checksums[i])));
    }
    advance(tensor.bytes);
  }
  // Checksums only prove that the bytes are the writer's: the values may still be invalid.
  for (const ModuleRecord& record : impl.reader->modules()) {
    MARLIN_RETURN_IF_ERROR(checkpoint.Weights(record.module.name).status());
    for (const PartTensor& part : impl.reader->Parts(record)) {
      impl.Release(part.tensor);
      advance(impl.tensors[part.tensor].bytes);
    }
  }
  return {};
}

bool HasExperts(const Checkpoint& checkpoint) {
  return std::any_of(checkpoint.tensors().begin(), checkpoint.tensors().end(),
                     [](const TensorInfo& tensor) {
                       return ClassifyTensor(tensor.name) == LayerClass::kMoeExpert;
                     });
}

}  // namespace marlin
