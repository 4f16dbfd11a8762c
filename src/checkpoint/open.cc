// Checkpoint::Open: which files a path means, and whether they agree with each other.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <new>
#include <set>

#include "base/macros.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/model_directory.h"
#include "checkpoint/safetensors.h"
#include "layout/weights_buffer.h"

namespace marlin {

// Builds an Impl step by step; a friend's nested access keeps Impl private to everybody else.
class CheckpointOpener {
 public:
  CheckpointOpener(Io& io, Checkpoint::Impl* impl) : io_(io), impl_(*impl) {}
  Status Run();

 private:
  Status OpenFile();
  Status OpenDirectory();
  Status ExplainMissing(const std::vector<std::string>& names) const;
  Status AddFile(const std::string& directory, const std::string& name);
  Status AddIndexed(const std::string& index_name);
  Result<std::map<std::string, std::string>> ReadWeightMap(const std::string& index_path);
  Status CheckWeightMap(const std::string& index_path,
                        const std::map<std::string, std::string>& weight_map) const;
  Status SortTensors();
  Status AddChecksum(const TensorInfo& tensor, uint32_t file);
  Status ReadConfig(const std::vector<std::string>& names);
  Status Fail(Code code, const std::string& message) const {
    return Status(code, Printable(impl_.path) + ": " + message);
  }

  Io& io_;
  Checkpoint::Impl& impl_;
  std::vector<std::map<std::string, std::string>> metadata_;
};

namespace {

constexpr std::string_view kSafetensors = ".safetensors";
constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";
constexpr std::string_view kConfigFile = "config.json";
constexpr std::string_view kAdapterFile = "adapter_config.json";

struct ForeignKind {
  std::string_view suffix;
  std::string_view what;
};
constexpr std::string_view kPickle =
    "a PyTorch pickle, which is never opened because loading it can run code: convert it to "
    "safetensors";
constexpr std::array<ForeignKind, 9> kForeignKinds = {{
    {".gguf", "a GGUF file, which is not supported"},
    {".onnx", "an ONNX model, which is not supported"},
    {".bin", kPickle},
    {".pt", kPickle},
    {".pth", kPickle},
    {".ckpt", kPickle},
    {".h5", "an HDF5 file, which is not supported"},
    {".msgpack", "a Flax msgpack file, which is not supported"},
    {".npz", "a NumPy archive, which is not supported"},
}};

const ForeignKind* FindForeignKind(std::string_view name) {
  for (const ForeignKind& kind : kForeignKinds) {
    if (name.ends_with(kind.suffix)) return &kind;
  }
  return nullptr;
}

// What a file says about itself in its first bytes, for files with a misleading name.
std::string_view SniffForeign(std::string_view text) {
  if (text.starts_with("GGUF")) return kForeignKinds[0].what;
  if (text.starts_with("PK\x03\x04") || text.starts_with("\x80\x02")) return kPickle;
  return {};
}

bool IsPlainFileName(const std::string& name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
}

std::optional<uint64_t> ParseChecksum(const std::string& text) {
  constexpr std::string_view kPrefix = "xxh3:";
  if (text.size() != kPrefix.size() + 16 || !text.starts_with(kPrefix)) return std::nullopt;
  uint64_t value = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data() + kPrefix.size(), end, value, 16);
  if (parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
  return value;
}

}  // namespace

std::string ChecksumKey(std::string_view tensor_name) {
  return "checksum." + std::string(tensor_name);
}

Status CheckpointOpener::AddFile(const std::string& directory, const std::string& name) {
  const std::string path = directory.empty() ? impl_.path : JoinPath(directory, name);
  if (!directory.empty()) MARLIN_RETURN_IF_ERROR(CheckModelFile(io_, directory, name));
  MARLIN_ASSIGN_OR_RETURN(const FileInfo info, io_.Stat(path));
  if (info.kind == FileKind::kMissing) {
    return Status(Code::kIo, Printable(path) + ": no such file");
  }
  MARLIN_ASSIGN_OR_RETURN(std::shared_ptr<const Mapping> mapping, io_.Map(path));
  if (const std::string_view foreign = SniffForeign(mapping->text()); !foreign.empty()) {
    return Status(Code::kUnsupported, fmt::format("{}: {}", Printable(path), foreign));
  }
  const std::span<const std::byte> image(mapping->data(), static_cast<size_t>(mapping->size()));
  MARLIN_ASSIGN_OR_RETURN(SafetensorsHeader header, ParseSafetensors(image, path, name));
  impl_.files.push_back({name, info, std::move(mapping), header.data_begin});
  if (impl_.tensors.empty()) {
    impl_.tensors = std::move(header.tensors);
  } else {
    std::move(header.tensors.begin(), header.tensors.end(), std::back_inserter(impl_.tensors));
  }
  metadata_.push_back(std::move(header.metadata));
  return {};
}

Result<std::map<std::string, std::string>> CheckpointOpener::ReadWeightMap(
    const std::string& index_path) {
  MARLIN_ASSIGN_OR_RETURN(const std::string text, io_.ReadText(index_path, kCheckpointJson.bytes));
  MARLIN_ASSIGN_OR_RETURN(const Json json, ParseJsonObject(text, index_path));
  const auto malformed = [&index_path](const std::string& message) {
    return Status(Code::kMalformedFile, Printable(index_path) + ": " + message);
  };
  const auto weight_map = json.find("weight_map");
  if (weight_map == json.end() || !weight_map->is_object()) {
    return malformed("no object \"weight_map\"");
  }
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : weight_map->items()) {
    if (!file.is_string()) {
      return malformed(fmt::format("tensor \"{}\": expected a file name, got {}", Printable(name),
                                   file.type_name()));
    }
    const auto& file_name = file.get_ref<const std::string&>();
    if (!IsPlainFileName(file_name)) {
      return malformed(
          fmt::format("tensor \"{}\": \"{}\" is not the name of a file in the directory",
                      Printable(name), Printable(file_name)));
    }
    files.emplace(name, file_name);
  }
  return files;
}

Status CheckpointOpener::CheckWeightMap(
    const std::string& index_path, const std::map<std::string, std::string>& weight_map) const {
  const auto malformed = [&index_path](const std::string& message) {
    return Status(Code::kMalformedFile, Printable(index_path) + ": " + message);
  };
  for (const TensorInfo& tensor : impl_.tensors) {
    const auto entry = weight_map.find(tensor.name);
    if (entry == weight_map.end()) {
      return malformed(fmt::format("tensor \"{}\" of {} is not listed", Printable(tensor.name),
                                   Printable(tensor.file)));
    }
    if (entry->second != tensor.file) {
      return malformed(fmt::format("tensor \"{}\" is listed in {} and lies in {}",
                                   Printable(tensor.name), Printable(entry->second),
                                   Printable(tensor.file)));
    }
  }
  if (impl_.tensors.size() == weight_map.size()) return {};
  std::set<std::string_view> present;
  for (const TensorInfo& tensor : impl_.tensors) present.insert(tensor.name);
  for (const auto& [name, file] : weight_map) {
    if (!present.contains(name)) {
      return malformed(fmt::format("tensor \"{}\" is listed in {}, which does not hold it",
                                   Printable(name), Printable(file)));
    }
  }
  return malformed(
      fmt::format("{} tensors listed, {} found", weight_map.size(), impl_.tensors.size()));
}

Status CheckpointOpener::AddIndexed(const std::string& index_name) {
  const std::string index_path = JoinPath(impl_.path, index_name);
  MARLIN_RETURN_IF_ERROR(CheckModelFile(io_, impl_.path, index_name));
  using WeightMap = std::map<std::string, std::string>;
  MARLIN_ASSIGN_OR_RETURN(const WeightMap weight_map, ReadWeightMap(index_path));
  std::set<std::string> shards;
  for (const auto& [name, file] : weight_map) shards.insert(file);
  if (shards.empty()) {
    return Status(Code::kMalformedFile, Printable(index_path) + ": \"weight_map\" is empty");
  }
  for (const std::string& shard : shards) MARLIN_RETURN_IF_ERROR(AddFile(impl_.path, shard));
  return CheckWeightMap(index_path, weight_map);
}

Status CheckpointOpener::ExplainMissing(const std::vector<std::string>& names) const {
  for (const std::string& name : names) {
    if (const ForeignKind* kind = FindForeignKind(name)) {
      return Fail(Code::kUnsupported,
                  fmt::format("no *.safetensors; {} is {}", Printable(name), kind->what));
    }
  }
  return Fail(Code::kInvalidArgument, "the directory holds no *.safetensors");
}

Status CheckpointOpener::OpenDirectory() {
  MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> names, io_.List(impl_.path));
  const auto has = [&names](std::string_view name) {
    return std::binary_search(names.begin(), names.end(), name);
  };
  if (has(kAdapterFile) && !has(kSingleFile) && !has(kIndexFile)) {
    return Fail(Code::kUnsupported,
                "an adapter (adapter_config.json) without its base model: merge it first");
  }
  if (has(kSingleFile)) {
    MARLIN_RETURN_IF_ERROR(AddFile(impl_.path, std::string(kSingleFile)));
  } else if (has(kIndexFile)) {
    MARLIN_RETURN_IF_ERROR(AddIndexed(std::string(kIndexFile)));
  } else {
    for (const std::string& name : names) {
      if (!name.ends_with(kSafetensors)) continue;
      MARLIN_RETURN_IF_ERROR(AddFile(impl_.path, name));
    }
    if (impl_.files.empty()) return ExplainMissing(names);
  }
  MARLIN_RETURN_IF_ERROR(SortTensors());
  return ReadConfig(names);
}

Status CheckpointOpener::OpenFile() {
  const std::string name = impl_.path.substr(impl_.path.rfind('/') + 1);
  if (const ForeignKind* kind = FindForeignKind(name)) {
    return Fail(Code::kUnsupported, std::string(kind->what));
  }
  MARLIN_RETURN_IF_ERROR(AddFile("", name));
  return SortTensors();
}

Status CheckpointOpener::AddChecksum(const TensorInfo& tensor, uint32_t file) {
  std::optional<uint64_t> checksum;
  const auto stored = metadata_[file].find(ChecksumKey(tensor.name));
  if (stored != metadata_[file].end()) {
    checksum = ParseChecksum(stored->second);
    if (!checksum) {
      return Fail(
          Code::kMalformedFile,
          fmt::format("{}: tensor \"{}\": checksum \"{}\" is not xxh3 and 16 digits",
                      Printable(tensor.file), Printable(tensor.name), Printable(stored->second)));
    }
  }
  impl_.checksums.push_back(checksum);
  return {};
}

Status CheckpointOpener::SortTensors() {
  std::vector<TensorInfo>& tensors = impl_.tensors;
  const auto by_name = [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; };
  if (!std::is_sorted(tensors.begin(), tensors.end(), by_name)) {
    std::stable_sort(tensors.begin(), tensors.end(), by_name);
  }
  std::unordered_map<std::string_view, uint32_t> numbers;
  for (size_t i = 0; i < impl_.files.size(); ++i) {
    numbers.emplace(impl_.files[i].name, static_cast<uint32_t>(i));
  }
  impl_.tensor_file.reserve(tensors.size());
  impl_.checksums.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i > 0 && tensors[i - 1].name == tensors[i].name) {
      return Fail(Code::kMalformedFile,
                  fmt::format("tensor \"{}\" lies in both {} and {}", Printable(tensors[i].name),
                              Printable(tensors[i - 1].file), Printable(tensors[i].file)));
    }
    const uint32_t file = numbers.at(tensors[i].file);
    impl_.tensor_file.push_back(file);
    MARLIN_RETURN_IF_ERROR(AddChecksum(tensors[i], file));
  }
  return {};
}

Status CheckpointOpener::ReadConfig(const std::vector<std::string>& names) {
  if (!std::binary_search(names.begin(), names.end(), kConfigFile)) return {};
  const std::string path = JoinPath(impl_.path, std::string(kConfigFile));
  MARLIN_RETURN_IF_ERROR(CheckModelFile(io_, impl_.path, std::string(kConfigFile)));
  MARLIN_ASSIGN_OR_RETURN(impl_.config_json, io_.ReadText(path, kCheckpointJson.bytes));
  MARLIN_ASSIGN_OR_RETURN(impl_.config, ParseJsonObject(impl_.config_json, path));
  const auto quantization = impl_.config.find("quantization_config");
  if (quantization == impl_.config.end() || !quantization->is_object()) return {};
  const auto method = quantization->find("quant_method");
  if (method == quantization->end() || *method != Json(kQuantMethod)) return {};
  MARLIN_ASSIGN_OR_RETURN(impl_.quantization, ParseQuantizationConfig(*quantization, path));
  impl_.quantized = true;
  for (const ModuleRecord& record : impl_.quantization.modules) {
    impl_.modules.push_back(record.module);
  }
  for (size_t i = 0; i < impl_.modules.size(); ++i) {
    impl_.module_index.emplace(impl_.modules[i].name, i);
  }
  return CheckModuleTensors(impl_);
}

Status CheckpointOpener::Run() {
  MARLIN_ASSIGN_OR_RETURN(const FileInfo info, io_.Stat(impl_.path));
  switch (info.kind) {
    case FileKind::kMissing:
      return Fail(Code::kIo, "no such file or directory");
    case FileKind::kLink:
    case FileKind::kOther:
      return Fail(Code::kIo, "neither a regular file nor a directory");
    case FileKind::kDirectory:
      impl_.is_directory = true;
      return OpenDirectory();
    case FileKind::kRegular:
      return OpenFile();
  }
  return Fail(Code::kInternal, "unknown kind of file");
}

Status CheckModuleTensors(const Checkpoint::Impl& impl) {
  std::unordered_map<std::string, std::string_view> owners;
  for (const ModuleRecord& record : impl.quantization.modules) {
    const auto malformed = [&](const std::string& message) {
      return Status(Code::kMalformedFile, fmt::format("{}: module \"{}\": {}", Printable(impl.path),
                                                      Printable(record.module.name), message));
    };
    for (const ModuleTensor& expected : ModuleTensors(record)) {
      const std::string name = Printable(expected.name);
      const std::optional<size_t> found = impl.FindTensor(expected.name);
      if (!found) return malformed(fmt::format("no tensor \"{}\"", name));
      const TensorInfo& tensor = impl.tensors[*found];
      if (tensor.dtype != expected.dtype || !(tensor.shape == expected.shape)) {
        return malformed(fmt::format("tensor \"{}\": expected {} {}, got {} {}", name,
                                     DTypeName(expected.dtype), expected.shape.ToString(),
                                     DTypeName(tensor.dtype), tensor.shape.ToString()));
      }
      const auto [owner, inserted] = owners.emplace(expected.name, record.module.name);
      if (!inserted) {
        return malformed(fmt::format("tensor \"{}\" belongs to module \"{}\" too", name,
                                     Printable(owner->second)));
      }
    }
    const Status possible = CheckSpec(record.module.spec);
    if (!possible.ok()) return malformed(possible.message());
  }
  return {};
}

std::optional<size_t> Checkpoint::Impl::FindTensor(std::string_view name) const {
  const auto found = std::lower_bound(tensors.begin(), tensors.end(), name,
                                      [](const TensorInfo& tensor, std::string_view key) {
                                        return std::string_view(tensor.name) < key;
                                      });
  if (found == tensors.end() || found->name != name) return std::nullopt;
  return static_cast<size_t>(found - tensors.begin());
}

Result<Checkpoint> CheckpointAccess::Open(Io& io, const std::string& path) {
  try {
    auto impl = std::make_shared<Checkpoint::Impl>();
    impl->path = path;
    MARLIN_RETURN_IF_ERROR(CheckpointOpener(io, impl.get()).Run());
    return Checkpoint(std::move(impl));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, Printable(path) + ": no memory to open it");
  }
}

}  // namespace marlin
