#include "checkpoint/convert/conversion.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/macros.h"
#include "checkpoint/convert/model_card.h"
#include "checkpoint/files/checksum.h"
#include "checkpoint/files/model_directory.h"

namespace marlin {
namespace {

constexpr int64_t kCopyChunk = int64_t{8} << 20;
constexpr size_t kMaxSideFiles = 1000;

const char kConfigName[] = "config.json";
const char kIndexName[] = "model.safetensors.index.json";

constexpr std::array<std::string_view, 4> kSideSuffixes = {".json", ".txt", ".model", ".jinja"};
constexpr std::array<std::string_view, 3> kSidePrefixes = {"LICENSE", "NOTICE", "USE_POLICY"};

Result<std::vector<std::string>> SideFiles(Io& io, const Checkpoint::Impl& source) {
  std::vector<std::string> side;
  if (!source.is_directory) return side;
  MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> names, io.List(source.path));
  for (const std::string& name : names) {
    if (!IsSideFile(name)) continue;
    MARLIN_RETURN_IF_ERROR(CheckModelFile(io, source.path, name));
    MARLIN_ASSIGN_OR_RETURN(const FileInfo info, io.Stat(JoinPath(source.path, name)));
    if (info.kind == FileKind::kRegular) side.push_back(name);
  }
  if (side.size() > kMaxSideFiles) {
    return Status(Code::kMalformedFile,
                  fmt::format("{}: {} small files to copy, at most {} are accepted",
                              Printable(source.path), side.size(), kMaxSideFiles));
  }
  return side;
}

Status CopySideFiles(Io& io, const Checkpoint::Impl& source, const std::vector<std::string>& names,
                     OutputDirectory* directory) {
  for (const std::string& name : names) {
    MARLIN_ASSIGN_OR_RETURN(const std::string content,
                            io.ReadText(JoinPath(source.path, name), kMaxSideFileBytes));
    MARLIN_RETURN_IF_ERROR(directory->WriteFile(name, content));
  }
  for (const ContainedFile& file : source.reader->Files()) {
    // A file of the directory is the newer one.
    if (!file.obstacle.empty() || std::find(names.begin(), names.end(), file.name) != names.end())
      continue;
    MARLIN_RETURN_IF_ERROR(directory->WriteFile(file.name, file.content));
  }
  return {};
}

Result<int64_t> WriteShard(const Conversion& conversion, size_t shard, bool resume,
                           TensorWriter* writer) {
  ShardNote note;
  const size_t first = writer->first_unit(shard);
  const size_t count = writer->unit_count(shard);
  if (resume && writer->FindFinished(shard, &note)) {
    for (size_t i = 0; i < count; ++i) {
      conversion.skip_unit(first + i, note.marks.empty() ? '\0' : note.marks[i]);
    }
    return note.number;
  }
  note = {};
  MARLIN_RETURN_IF_ERROR(writer->BeginShard(shard));
  for (size_t unit = first; unit < first + count; ++unit) {
    MARLIN_ASSIGN_OR_RETURN(const int64_t number, conversion.write_unit(writer, unit));
    note.number += number;
    if (conversion.mark) note.marks += conversion.mark(unit);
  }
  MARLIN_RETURN_IF_ERROR(writer->EndShard(note));
  return note.number;
}

Result<int64_t> FillDirectory(Io& io, const Checkpoint::Impl& source, const Conversion& conversion,
                              const std::vector<std::string>& side, OutputDirectory* directory) {
  TensorWriter writer(io, conversion.units, {conversion.shard_bytes});
  writer.SetDirectory(directory->path());
  if (conversion.mark) writer.ExpectMarks();
  std::vector<std::string> shards;
  for (size_t i = 0; i < writer.shard_count(); ++i) shards.push_back(writer.shard_name(i));
  MARLIN_RETURN_IF_ERROR(directory->RemoveAllExcept(shards));
  int64_t sum = 0;
  for (size_t i = 0; i < writer.shard_count(); ++i) {
    MARLIN_ASSIGN_OR_RETURN(const int64_t number,
                            WriteShard(conversion, i, conversion.options.resume, &writer));
    directory->AddWritten(writer.shard_name(i), writer.shard_file(i));
    sum += number;
  }
  const std::string index = writer.IndexJson();
  if (!index.empty()) {
    MARLIN_RETURN_IF_ERROR(directory->WriteFile(kIndexName, index));
  }
  MARLIN_RETURN_IF_ERROR(CopySideFiles(io, source, side, directory));
  if (!conversion.config_json.empty()) {
    std::string config = conversion.config_json;
    if (conversion.written_config) {
      MARLIN_ASSIGN_OR_RETURN(config, conversion.written_config());
    }
    MARLIN_RETURN_IF_ERROR(directory->WriteFile(kConfigName, config));
  }
  std::string card;
  if (conversion.model_card) {
    MARLIN_ASSIGN_OR_RETURN(card, conversion.model_card());
  }
  MARLIN_ASSIGN_OR_RETURN(card, CardToWrite(io, conversion.target, std::move(card)));
  if (!card.empty()) {
    MARLIN_RETURN_IF_ERROR(directory->WriteFile(std::string(kModelCardName), card));
  }
  return sum;
}

// Shard headers use this name for their metadata.
constexpr std::string_view kMetadataName = "__metadata__";

Status CheckTensorName(const Checkpoint::Impl& source, const std::string& name) {
  const auto bytes = static_cast<int64_t>(name.size());
  const auto refused = [&](const std::string& why) {
    return Status(Code::kUnsupported, fmt::format("{}: tensor \"{}\": {}", Printable(source.path),
                                                  Printable(name), why));
  };
  if (bytes > kMaxNameBytes) {
    return refused(
        fmt::format("would have a name of {} bytes, at most {} are read", bytes, kMaxNameBytes));
  }
  if (name == kMetadataName) return refused("no tensor of a safetensors file has this name");
  return {};
}

Status CheckFileSize(const std::string& path, const std::string& content) {
  const auto bytes = static_cast<int64_t>(content.size());
  if (bytes <= kCheckpointJson.bytes) return {};
  return Status(Code::kUnsupported, fmt::format("{}: would have {} bytes, at most {} are read",
                                                Printable(path), bytes, kCheckpointJson.bytes));
}

}  // namespace

bool IsSideFile(std::string_view name) {
  // These describe the source's weights, not the output's.
  if (name == kConfigName || name.ends_with(".index.json")) return false;
  if (IsQuantizationFile(name)) return false;
  if (name.starts_with(".")) return false;
  for (const std::string_view suffix : kSideSuffixes) {
    if (name.ends_with(suffix)) return true;
  }
  for (const std::string_view prefix : kSidePrefixes) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

Result<std::map<FileIdentity, std::string>> SourceFiles(Io& io, const Checkpoint::Impl& source) {
  std::map<FileIdentity, std::string> files;
  MARLIN_ASSIGN_OR_RETURN(const FileInfo whole, io.Stat(source.path));
  files.emplace(whole.identity, source.path);
  for (const CheckpointFile& file : source.files) {
    files.emplace(file.info.identity,
                  source.is_directory ? JoinPath(source.path, file.name) : source.path);
  }
  if (!source.is_directory) return files;
  MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> names, io.List(source.path));
  for (const std::string& name : names) {
    const std::string path = JoinPath(source.path, name);
    const Result<FileInfo> info = io.Stat(path);
    if (!info.ok()) continue;  // Unreadable, for instance a cycle of links.
    // An earlier output may be a subdirectory of the source, and may be replaced.
    if (info->kind == FileKind::kRegular) files.emplace(info->identity, path);
  }
  return files;
}

Result<LoadedTensor> LoadedTensor::Load(const Checkpoint::Impl& source, size_t tensor) {
  const TensorInfo& info = source.tensors[tensor];
  LoadedTensor loaded;
  loaded.mapping_ = source.files[source.tensor_file[tensor]].mapping;
  loaded.offset_ = info.offset;
  loaded.bytes_ = info.bytes;
  const std::byte* data = loaded.mapping_->data() + info.offset;
  if (const auto computed = source.computed.find(tensor); computed != source.computed.end()) {
    MARLIN_ASSIGN_OR_RETURN(loaded.copy_, AlignedBuffer::Allocate(info.bytes));
    computed->second(loaded.copy_.data());
    data = loaded.copy_.data();
    loaded.bytes_ = std::min(info.bytes, loaded.mapping_->size() - info.offset);
  } else if (reinterpret_cast<uintptr_t>(data) % static_cast<uint64_t>(DTypeBytes(info.dtype)) !=
             0) {
    MARLIN_ASSIGN_OR_RETURN(loaded.copy_, AlignedBuffer::Allocate(info.bytes));
    std::memcpy(loaded.copy_.data(), data, static_cast<size_t>(info.bytes));
    loaded.mapping_->Release(info.offset, info.bytes);
    data = loaded.copy_.data();
  }
  loaded.view_ = TensorView(data, info.dtype, info.shape);
  return loaded;
}

LoadedTensor::~LoadedTensor() {
  if (mapping_ != nullptr) mapping_->Release(offset_, bytes_);
}

TensorView MatrixOf(const TensorView& tensor, int64_t expert) {
  if (expert < 0) return tensor;
  const int64_t bytes = tensor.dim(1) * tensor.dim(2) * DTypeBytes(tensor.dtype());
  return {tensor.As<std::byte>() + expert * bytes, tensor.dtype(), {tensor.dim(1), tensor.dim(2)}};
}

Status CopyTensor(const Checkpoint::Impl& source, size_t tensor, size_t unit,
                  TensorWriter* writer) {
  const TensorInfo& info = source.tensors[tensor];
  if (source.computed.contains(tensor)) {
    MARLIN_ASSIGN_OR_RETURN(const LoadedTensor loaded, LoadedTensor::Load(source, tensor));
    return writer->Append(unit, 0, loaded.view().data(), info.bytes);
  }
  const Mapping& mapping = *source.files[source.tensor_file[tensor]].mapping;
  for (int64_t done = 0; done < info.bytes; done += kCopyChunk) {
    const int64_t bytes = std::min(kCopyChunk, info.bytes - done);
    const int64_t offset = info.offset + done;
    MARLIN_RETURN_IF_ERROR(writer->Append(unit, 0, mapping.data() + offset, bytes));
    mapping.Release(offset, bytes);
  }
  return {};
}

std::string Fingerprint(const Checkpoint::Impl& source, std::string_view parameters) {
  std::string inputs = fmt::format("writer {}\n{}\n", kCheckpointVersion, parameters);
  for (const CheckpointFile& file : source.files) {
    const std::string_view header =
        file.mapping->text().substr(0, static_cast<size_t>(file.data_begin));
    inputs += fmt::format("{} {} {} {:016x}\n", file.name, file.info.size, file.info.modified_ns,
                          ChecksumOf(header));
  }
  inputs += source.config_json;
  return fmt::format("{:016x}", ChecksumOf(inputs));
}

Status CheckReadable(Io& io, const Checkpoint::Impl& source, const Conversion& conversion) {
  std::set<std::string_view> names;
  for (const OutputUnit& unit : conversion.units) {
    for (const OutputTensor& tensor : unit) {
      MARLIN_RETURN_IF_ERROR(CheckTensorName(source, tensor.name));
      if (names.insert(tensor.name).second) continue;
      return Status(Code::kMalformedFile,
                    fmt::format("{}: two tensors would both be stored as \"{}\"",
                                Printable(source.path), Printable(tensor.name)));
    }
  }
  const TensorWriter layout(io, conversion.units, {conversion.shard_bytes});
  const std::string target = conversion.target;
  MARLIN_RETURN_IF_ERROR(CheckFileSize(JoinPath(target, kIndexName), layout.IndexJson()));
  const std::string config_path = JoinPath(target, kConfigName);
  MARLIN_RETURN_IF_ERROR(CheckFileSize(config_path, conversion.config_json));
  if (conversion.config_json.empty()) return {};
  // The reader's own parser checks the remaining limits.
  MARLIN_ASSIGN_OR_RETURN(const Json config, ParseJsonObject(conversion.config_json, config_path));
  const auto quantization = config.find("quantization_config");
  if (quantization == config.end()) return {};
  // Another program wrote the others.
  if (quantization->value("quant_method", "") != kQuantMethod) return {};
  return ParseQuantizationConfig(*quantization, config_path).status();
}

Result<int64_t> RunConversion(Io& io, const Checkpoint::Impl& source,
                              const Conversion& conversion) {
  MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> side, SideFiles(io, source));
  OutputDirectory::Options options = conversion.options;
  MARLIN_ASSIGN_OR_RETURN(options.source, SourceFiles(io, source));
  MARLIN_ASSIGN_OR_RETURN(
      OutputDirectory directory,
      OutputDirectory::Begin(io, conversion.target, conversion.fingerprint, options));
  Result<int64_t> result = FillDirectory(io, source, conversion, side, &directory);
  if (result.ok()) {
    if (const Status status = directory.Commit(); !status.ok()) result = status;
  }
  if (!result.ok() && options.resume) {
    const Code code = result.status().code();
    if (code == Code::kIo || code == Code::kOutOfMemory) directory.Keep();
  }
  return result;
}

}  // namespace marlin
