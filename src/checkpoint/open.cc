// Checkpoint::Open: finds the files of a path and checks that they agree with each other.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <new>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "base/macros.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/decoder_names.h"
#include "checkpoint/files/file_names.h"
#include "checkpoint/files/model_directory.h"
#include "checkpoint/files/narrow_doubles.h"
#include "checkpoint/files/safetensors.h"

namespace marlin {

// Builds an Impl step by step; a nested friend keeps Impl private to all other code.
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
  void KeepStoredNames();
  Status FindChecksums();
  Status ReadConfig(const std::vector<std::string>& names);
  Status OpenContainer(const Container& container, const std::string& directory,
                       const std::string& name);
  Status MapContainer(const Container& container, const std::string& directory,
                      const std::string& name);
  Status OpenInDirectory(const std::vector<std::string>& names);
  Status TakeReader(Result<std::unique_ptr<const ModuleReader>> reader);
  Status Fail(Code code, const std::string& message) const {
    return Status(code, Printable(impl_.path) + ": " + message);
  }

  Io& io_;
  Checkpoint::Impl& impl_;
  std::vector<std::map<std::string, std::string>> metadata_;
  /// The names of tensors in their files, under which checksums are stored, by file and place.
  std::map<std::tuple<std::string, int64_t, int64_t>, std::string> stored_names_;
};

namespace {

constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";
constexpr std::string_view kAdapterFile = "adapter_config.json";

struct ForeignKind {
  std::string_view suffix;
  std::string_view what;
};
constexpr std::string_view kPickle =
    "a PyTorch pickle, which is never opened because loading it can run code: convert it to "
    "safetensors";
constexpr std::string_view kGgufMagic = "GGUF";
constexpr std::array<ForeignKind, 7> kForeignKinds = {{
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

// Identifies foreign formats by their first bytes, for files with a misleading suffix.
std::string_view SniffForeign(std::string_view text) {
  if (text.starts_with(kGgufMagic)) return "a GGUF file: its name must end in .gguf";
  if (text.starts_with("PK\x03\x04") || text.starts_with("\x80\x02")) return kPickle;
  return {};
}

/// "<stem>-00002-of-00005<suffix>": one of the files of a sharded container.
struct ShardName {
  std::string stem;
  std::string suffix;
  int64_t number = 0;
  int64_t count = 0;
};

std::string ShardFile(const ShardName& shard, int64_t number) {
  return fmt::format("{}-{:05}-of-{:05}{}", shard.stem, number, shard.count, shard.suffix);
}

std::optional<ShardName> ParseShardName(std::string_view name, std::string_view suffix) {
  constexpr std::string_view kOf = "-of-";
  constexpr size_t kDigits = 5;
  constexpr size_t kTail = 1 + 2 * kDigits + kOf.size();
  if (!name.ends_with(suffix) || name.size() <= suffix.size() + kTail) return std::nullopt;
  const size_t begin = name.size() - suffix.size() - kTail;
  ShardName shard{std::string(name.substr(0, begin)), std::string(suffix), 0, 0};
  std::from_chars(name.data() + begin + 1, name.data() + begin + 1 + kDigits, shard.number);
  const char* const count = name.data() + begin + kTail - kDigits;
  std::from_chars(count, count + kDigits, shard.count);
  if (shard.number < 1 || shard.number > shard.count) return std::nullopt;
  // Written back it must be the same name: five digits each, and the separators.
  if (ShardFile(shard, shard.number) != name) return std::nullopt;
  return shard;
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

/// An index: the file of each tensor.
class WeightMap {
 public:
  explicit WeightMap(std::string path) : path_(std::move(path)) {}

  Status Read(Io& io) {
    MARLIN_ASSIGN_OR_RETURN(const std::string text, io.ReadText(path_, kCheckpointJson.bytes));
    MARLIN_ASSIGN_OR_RETURN(const Json json, ParseJsonObject(text, path_));
    const auto weight_map = json.find("weight_map");
    if (weight_map == json.end() || !weight_map->is_object()) {
      return Malformed("no object \"weight_map\"");
    }
    for (const auto& [name, file] : weight_map->items()) {
      if (!file.is_string()) {
        return Malformed(fmt::format("tensor \"{}\": expected a file name, got {}", Printable(name),
                                     file.type_name()));
      }
      const auto& file_name = file.get_ref<const std::string&>();
      if (!IsPlainFileName(file_name)) {
        return Malformed(
            fmt::format("tensor \"{}\": \"{}\" is not the name of a file in the directory",
                        Printable(name), Printable(file_name)));
      }
      files_.emplace(name, file_name);
    }
    return files_.empty() ? Malformed("\"weight_map\" is empty") : Status();
  }

  std::set<std::string> Shards() const {
    std::set<std::string> shards;
    for (const auto& [name, file] : files_) shards.insert(file);
    return shards;
  }

  /// A tensor may also be in another file than the listed one, unless that holds one of its name.
  void DropUnlisted(TensorStore* store) const {
    std::set<std::pair<std::string, std::string>> held;
    for (const TensorInfo& tensor : store->tensors) held.emplace(tensor.name, tensor.file);
    const size_t dropped = std::erase_if(store->tensors, [&](const TensorInfo& tensor) {
      const auto entry = files_.find(tensor.name);
      if (entry == files_.end()) return true;
      return entry->second != tensor.file && held.contains(*entry);
    });
    if (dropped == 0) return;
    store->notes.push_back(
        fmt::format("{} tensors that {} does not list are left out", dropped, kIndexFile));
  }

  /// Whether the files hold the listed tensors and no other.
  Status Check(const std::vector<TensorInfo>& tensors, bool in_other_files) const {
    for (const TensorInfo& tensor : tensors) {
      const auto entry = files_.find(tensor.name);
      if (entry == files_.end()) {
        return Malformed(
            fmt::format("tensor \"{}\" of {} is not listed (allow_extra_tensors leaves "
                        "such tensors out)",
                        Printable(tensor.name), Printable(tensor.file)));
      }
      if (entry->second != tensor.file && !in_other_files) {
        return Malformed(fmt::format("tensor \"{}\" is listed in {} but is in {}",
                                     Printable(tensor.name), Printable(entry->second),
                                     Printable(tensor.file)));
      }
    }
    if (tensors.size() == files_.size()) return {};
    std::set<std::string_view> present;
    for (const TensorInfo& tensor : tensors) present.insert(tensor.name);
    for (const auto& [name, file] : files_) {
      if (!present.contains(name)) {
        return Malformed(fmt::format("tensor \"{}\" is listed in {}, which does not hold it",
                                     Printable(name), Printable(file)));
      }
    }
    return Malformed(fmt::format("{} tensors listed, {} found", files_.size(), tensors.size()));
  }

 private:
  Status Malformed(const std::string& message) const {
    return Status(Code::kMalformedFile, Printable(path_) + ": " + message);
  }

  std::string path_;
  std::map<std::string, std::string> files_;
};

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

Status CheckpointOpener::AddIndexed(const std::string& index_name) {
  MARLIN_RETURN_IF_ERROR(CheckModelFile(io_, impl_.path, index_name));
  WeightMap weight_map(JoinPath(impl_.path, index_name));
  MARLIN_RETURN_IF_ERROR(weight_map.Read(io_));
  const std::set<std::string> shards = weight_map.Shards();
  for (const std::string& shard : shards) MARLIN_RETURN_IF_ERROR(AddFile(impl_.path, shard));
  const bool allow_extra = impl_.options.allow_extra_tensors;
  if (allow_extra) weight_map.DropUnlisted(&impl_);
  return weight_map.Check(impl_.tensors, allow_extra);
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
    if (impl_.files.empty()) return OpenInDirectory(names);
  }
  MARLIN_RETURN_IF_ERROR(SortTensors(&impl_));
  MARLIN_RETURN_IF_ERROR(ReadConfig(names));
  KeepStoredNames();
  MARLIN_RETURN_IF_ERROR(NameDecoderTensors(&impl_));
  MARLIN_RETURN_IF_ERROR(FindChecksums());
  MARLIN_ASSIGN_OR_RETURN(QuantMethod method, FindQuantMethod(io_, impl_, names));
  MARLIN_RETURN_IF_ERROR(TakeReader(OpenModules(impl_, method)));
  // Tensors of another form that all hold plain numbers are no quantized checkpoint.
  if (!impl_.modules.empty() || impl_.computed.empty()) impl_.quant_method = method.name;
  return {};
}

// A directory without safetensors may hold one model in another container.
Status CheckpointOpener::OpenInDirectory(const std::vector<std::string>& names) {
  const std::string* only = nullptr;
  for (const std::string& name : names) {
    if (FindContainer(name) == nullptr) continue;
    const std::optional<ShardName> shard = ParseShardName(name, FindContainer(name)->suffix);
    if (shard && shard->number > 1 && only != nullptr && *only == ShardFile(*shard, 1)) continue;
    if (only != nullptr) {
      return Fail(Code::kInvalidArgument, fmt::format("holds both {} and {}: name the file",
                                                      Printable(*only), Printable(name)));
    }
    only = &name;
  }
  if (only == nullptr) return ExplainMissing(names);
  return OpenContainer(*FindContainer(*only), impl_.path, *only);
}

Status CheckpointOpener::MapContainer(const Container& container, const std::string& directory,
                                      const std::string& name) {
  const std::string path = JoinPath(directory, name);
  if (impl_.is_directory) MARLIN_RETURN_IF_ERROR(CheckModelFile(io_, directory, name));
  MARLIN_ASSIGN_OR_RETURN(const FileInfo info, io_.Stat(path));
  if (info.kind == FileKind::kMissing) {
    return Status(Code::kIo, Printable(path) + ": no such file");
  }
  MARLIN_ASSIGN_OR_RETURN(std::shared_ptr<const Mapping> mapping, io_.Map(path));
  if (!mapping->text().starts_with(container.magic)) {
    return Status(Code::kMalformedFile, fmt::format("{}: does not begin with {}", Printable(path),
                                                    Printable(container.magic)));
  }
  impl_.files.push_back({name, info, std::move(mapping), 0});
  return {};
}

Status CheckpointOpener::OpenContainer(const Container& container, const std::string& directory,
                                       const std::string& name) {
  if (const std::optional<ShardName> shard = ParseShardName(name, container.suffix)) {
    for (int64_t i = 1; i <= shard->count; ++i) {
      MARLIN_RETURN_IF_ERROR(MapContainer(container, directory, ShardFile(*shard, i)));
    }
  } else {
    MARLIN_RETURN_IF_ERROR(MapContainer(container, directory, name));
  }
  MARLIN_RETURN_IF_ERROR(TakeReader(container.open(impl_, QuantMethod())));
  impl_.in_container = true;
  if (!impl_.modules.empty()) impl_.quant_method = container.suffix.substr(1);
  impl_.checksums.resize(impl_.tensors.size());
  return {};
}

Status CheckpointOpener::OpenFile() {
  const size_t slash = impl_.path.rfind('/');
  const std::string name = impl_.path.substr(slash + 1);
  if (IsOtherContainer(name)) {
    // With its slash, so that the file system's root is not taken for no folder.
    const std::string folder = impl_.path.substr(0, slash + 1);  // npos + 1 is 0.
    return OpenContainer(*FindContainer(name), folder, name);
  }
  if (const ForeignKind* kind = FindForeignKind(name)) {
    return Fail(Code::kUnsupported, std::string(kind->what));
  }
  MARLIN_RETURN_IF_ERROR(AddFile("", name));
  MARLIN_RETURN_IF_ERROR(SortTensors(&impl_));
  MARLIN_RETURN_IF_ERROR(FindChecksums());
  return TakeReader(OpenModules(impl_, QuantMethod()));
}

void CheckpointOpener::KeepStoredNames() {
  for (const TensorInfo& tensor : impl_.tensors) {
    stored_names_.emplace(std::tuple(tensor.file, tensor.offset, tensor.bytes), tensor.name);
  }
}

Status CheckpointOpener::FindChecksums() {
  impl_.checksums.reserve(impl_.tensors.size());
  for (size_t i = 0; i < impl_.tensors.size(); ++i) {
    const TensorInfo& tensor = impl_.tensors[i];
    const std::map<std::string, std::string>& metadata = metadata_[impl_.tensor_file[i]];
    std::optional<uint64_t> checksum;
    const auto name = stored_names_.find({tensor.file, tensor.offset, tensor.bytes});
    const auto stored =
        metadata.find(ChecksumKey(name == stored_names_.end() ? tensor.name : name->second));
    if (stored != metadata.end()) {
      checksum = ParseChecksum(stored->second);
      if (!checksum) {
        return Fail(
            Code::kMalformedFile,
            fmt::format("{}: tensor \"{}\": checksum \"{}\" is not xxh3 and 16 digits",
                        Printable(tensor.file), Printable(tensor.name), Printable(stored->second)));
      }
    }
    impl_.checksums.push_back(checksum);
  }
  return {};
}

Status CheckpointOpener::ReadConfig(const std::vector<std::string>& names) {
  if (!std::binary_search(names.begin(), names.end(), kConfigFile)) return {};
  const std::string path = JoinPath(impl_.path, std::string(kConfigFile));
  MARLIN_RETURN_IF_ERROR(CheckModelFile(io_, impl_.path, std::string(kConfigFile)));
  MARLIN_ASSIGN_OR_RETURN(std::string text, io_.ReadText(path, kCheckpointJson.bytes));
  return impl_.SetConfig(std::move(text), path);
}

Status CheckpointOpener::TakeReader(Result<std::unique_ptr<const ModuleReader>> reader) {
  MARLIN_ASSIGN_OR_RETURN(impl_.reader, std::move(reader));
  const std::vector<ModuleRecord>& records = impl_.reader->modules();
  impl_.modules.reserve(records.size());
  impl_.is_part.resize(impl_.tensors.size());
  for (const ModuleRecord& record : records) {
    impl_.modules.push_back(record.module);
    for (const PartTensor& part : impl_.reader->Parts(record)) impl_.is_part[part.tensor] = true;
  }
  for (size_t i = 0; i < impl_.modules.size(); ++i) {
    impl_.module_index.emplace(impl_.modules[i].name, i);
  }
  return {};
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
      MARLIN_RETURN_IF_ERROR(OpenDirectory());
      break;
    case FileKind::kRegular:
      MARLIN_RETURN_IF_ERROR(OpenFile());
  }
  NarrowDoubles(&impl_);
  return {};
}

Result<Checkpoint> CheckpointAccess::Open(Io& io, const std::string& path,
                                          const CheckpointOptions& options) {
  try {
    auto impl = std::make_shared<Checkpoint::Impl>();
    impl->path = path;
    impl->options = options;
    impl->io = &io;
    MARLIN_RETURN_IF_ERROR(CheckpointOpener(io, impl.get()).Run());
    impl->io = nullptr;
    return Checkpoint(std::move(impl));
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, Printable(path) + ": no memory to open it");
  }
}

}  // namespace marlin
