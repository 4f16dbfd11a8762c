#include "checkpoint/conversion.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/macros.h"
#include "checkpoint/checksum.h"

namespace marlin {
namespace {

constexpr int64_t kCopyChunk = int64_t{8} << 20;
constexpr int64_t kMaxSideFileBytes = int64_t{256} << 20;
constexpr size_t kMaxSideFiles = 1000;

constexpr std::array<std::string_view, 4> kSideSuffixes = {".json", ".txt", ".model", ".jinja"};
constexpr std::array<std::string_view, 3> kSidePrefixes = {"LICENSE", "NOTICE", "USE_POLICY"};

bool IsSideFile(std::string_view name) {
  // These describe the source's weights, not the output's.
  if (name == "config.json" || name.ends_with(".index.json")) return false;
  if (name == "quantize_config.json" || name == "hf_quant_config.json") return false;
  if (name.starts_with(".")) return false;
  for (const std::string_view suffix : kSideSuffixes) {
    if (name.ends_with(suffix)) return true;
  }
  for (const std::string_view prefix : kSidePrefixes) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

Result<std::vector<std::string>> SideFiles(Io& io, const Checkpoint::Impl& source) {
  std::vector<std::string> side;
  if (!source.is_directory) return side;
  MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> names, io.List(source.path));
  for (const std::string& name : names) {
    if (!IsSideFile(name)) continue;
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
  return {};
}

Result<int64_t> WriteShard(const Conversion& conversion, size_t shard, bool resume,
                           TensorWriter* writer) {
  int64_t note = 0;
  const size_t end = writer->first_unit(shard) + writer->unit_count(shard);
  if (resume && writer->FindFinished(shard, &note)) {
    for (size_t unit = writer->first_unit(shard); unit < end; ++unit) conversion.skip_unit(unit);
    return note;
  }
  note = 0;
  MARLIN_RETURN_IF_ERROR(writer->BeginShard(shard));
  for (size_t unit = writer->first_unit(shard); unit < end; ++unit) {
    MARLIN_ASSIGN_OR_RETURN(const int64_t number, conversion.write_unit(writer, unit));
    note += number;
  }
  MARLIN_RETURN_IF_ERROR(writer->EndShard(note));
  return note;
}

Result<int64_t> FillDirectory(Io& io, const Checkpoint::Impl& source, const Conversion& conversion,
                              OutputDirectory* directory) {
  TensorWriter writer(io, directory->path(), conversion.units, conversion.shard_bytes);
  MARLIN_ASSIGN_OR_RETURN(const std::vector<std::string> side, SideFiles(io, source));
  std::vector<std::string> shards;
  for (size_t i = 0; i < writer.shard_count(); ++i) shards.push_back(writer.shard_name(i));
  MARLIN_RETURN_IF_ERROR(directory->RemoveAllExcept(shards));
  int64_t sum = 0;
  for (size_t i = 0; i < writer.shard_count(); ++i) {
    MARLIN_ASSIGN_OR_RETURN(const int64_t note,
                            WriteShard(conversion, i, conversion.options.resume, &writer));
    sum += note;
  }
  const std::string index = writer.IndexJson();
  if (!index.empty()) {
    MARLIN_RETURN_IF_ERROR(directory->WriteFile("model.safetensors.index.json", index));
  }
  MARLIN_RETURN_IF_ERROR(CopySideFiles(io, source, side, directory));
  if (!conversion.config_json.empty()) {
    MARLIN_RETURN_IF_ERROR(directory->WriteFile("config.json", conversion.config_json));
  }
  return sum;
}

}  // namespace

Result<LoadedTensor> LoadedTensor::Load(const Checkpoint::Impl& source, size_t tensor) {
  const TensorInfo& info = source.tensors[tensor];
  LoadedTensor loaded;
  loaded.mapping_ = source.files[source.tensor_file[tensor]].mapping;
  loaded.offset_ = info.offset;
  loaded.bytes_ = info.bytes;
  const std::byte* data = loaded.mapping_->data() + info.offset;
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uint64_t>(DTypeBytes(info.dtype)) != 0) {
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

Status CopyTensor(const Checkpoint::Impl& source, size_t tensor, size_t unit,
                  TensorWriter* writer) {
  const TensorInfo& info = source.tensors[tensor];
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
  std::string facts = fmt::format("writer {}\n{}\n", kCheckpointVersion, parameters);
  for (const CheckpointFile& file : source.files) {
    const std::string_view header =
        file.mapping->text().substr(0, static_cast<size_t>(file.data_begin));
    facts += fmt::format("{} {} {} {:016x}\n", file.name, file.info.size, file.info.modified_ns,
                         ChecksumOf(header));
  }
  facts += source.config_json;
  return fmt::format("{:016x}", ChecksumOf(facts));
}

Status CheckNotSource(Io& io, const Checkpoint::Impl& source, const std::string& output) {
  MARLIN_ASSIGN_OR_RETURN(const FileInfo from, io.Stat(source.path));
  MARLIN_ASSIGN_OR_RETURN(const FileInfo to, io.Stat(output));
  bool same = to.kind != FileKind::kMissing && from.device == to.device && from.inode == to.inode;
  if (!source.is_directory && to.kind == FileKind::kDirectory) {
    // A single file may lie in the directory that would be replaced.
    MARLIN_ASSIGN_OR_RETURN(const FileInfo inside,
                            io.Stat(JoinPath(output, source.files.front().name)));
    same = same || (inside.device == from.device && inside.inode == from.inode);
  }
  if (!same) return {};
  return Status(Code::kInvalidArgument,
                fmt::format("{}: the output would replace the source", Printable(output)));
}

Result<int64_t> RunConversion(Io& io, const Checkpoint::Impl& source,
                              const Conversion& conversion) {
  MARLIN_RETURN_IF_ERROR(CheckNotSource(io, source, conversion.target));
  MARLIN_ASSIGN_OR_RETURN(
      OutputDirectory directory,
      OutputDirectory::Begin(io, conversion.target, conversion.fingerprint, conversion.options));
  const Result<int64_t> filled = FillDirectory(io, source, conversion, &directory);
  if (!filled.ok()) {
    if (conversion.options.resume && filled.status().code() == Code::kIo) directory.Keep();
    return filled.status();
  }
  MARLIN_RETURN_IF_ERROR(directory.Commit());
  return *filled;
}

}  // namespace marlin
