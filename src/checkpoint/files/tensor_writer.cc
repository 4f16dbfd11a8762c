#include "checkpoint/files/tensor_writer.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/json.h"
#include "base/macros.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/files/safetensors.h"

namespace marlin {
namespace {

constexpr std::string_view kNumberKey = "zeroed_groups";
constexpr std::string_view kMarksKey = "unit_marks";

// The largest power of two up to kDataAlignment that divides a size. Safetensors allows no holes,
// so tensors are sorted by this, largest first: then each is aligned to its own.
int64_t SizeAlignment(int64_t bytes) {
  int64_t alignment = kDataAlignment;
  while (bytes % alignment != 0) alignment /= 2;
  return alignment;
}

// Upper bound of the length word, the metadata other than checksums, and the padding.
constexpr int64_t kFixedHeaderBytes = 256;

// Upper bound of a tensor's share of the header: its name twice, once with its checksum, an entry
// of eight dimensions and two offsets with all their digits, and its unit's mark.
int64_t MostHeaderBytes(const OutputTensor& tensor) {
  constexpr int64_t kMostEntry = 320;
  return 2 * static_cast<int64_t>(Json(tensor.name).dump().size()) + kMostEntry;
}

bool SameEntry(const TensorInfo& found, const SafetensorsEntry& expected, int64_t data_begin) {
  return found.name == expected.name && found.dtype == expected.dtype &&
         found.shape == expected.shape && found.offset == data_begin + expected.begin;
}

}  // namespace

TensorWriter::TensorWriter(Io& io, const std::vector<OutputUnit>& units, const ShardLimits& limits)
    : io_(io) {
  CutShards(units, limits);
  for (size_t i = 0; i < shards_.size(); ++i) {
    Shard& shard = shards_[i];
    shard.name = shards_.size() == 1
                     ? "model.safetensors"
                     : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards_.size());
    LayOut(units, &shard);
    total_bytes_ += shard.bytes;
  }
}

void TensorWriter::CutShards(const std::vector<OutputUnit>& units, const ShardLimits& limits) {
  shards_.emplace_back();
  int64_t header_bytes = kFixedHeaderBytes;
  int64_t tensors = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    int64_t bytes = 0;
    int64_t entry_bytes = 0;
    for (const OutputTensor& tensor : units[i]) {
      bytes += tensor.bytes;
      entry_bytes += MostHeaderBytes(tensor);
    }
    const auto count = static_cast<int64_t>(units[i].size());
    const bool fits = shards_.back().bytes + bytes <= limits.data_bytes &&
                      header_bytes + entry_bytes <= limits.header_bytes &&
                      tensors + count <= limits.tensors;
    if (shards_.back().unit_count > 0 && !fits) {
      shards_.emplace_back();
      shards_.back().first_unit = i;
      header_bytes = kFixedHeaderBytes;
      tensors = 0;
    }
    shards_.back().unit_count += 1;
    shards_.back().bytes += bytes;
    header_bytes += entry_bytes;
    tensors += count;
  }
}

void TensorWriter::LayOut(const std::vector<OutputUnit>& units, Shard* shard) {
  struct Place {
    size_t unit;
    size_t tensor;
    int64_t alignment;
  };
  std::vector<Place> places;
  for (size_t u = 0; u < shard->unit_count; ++u) {
    const OutputUnit& unit = units[shard->first_unit + u];
    shard->entry_of.emplace_back(unit.size());
    for (size_t t = 0; t < unit.size(); ++t) {
      places.push_back({u, t, SizeAlignment(unit[t].bytes)});
    }
  }
  std::stable_sort(places.begin(), places.end(),
                   [](const Place& a, const Place& b) { return a.alignment > b.alignment; });
  int64_t begin = 0;
  for (const Place& place : places) {
    const OutputTensor& tensor = units[shard->first_unit + place.unit][place.tensor];
    shard->entry_of[place.unit][place.tensor] = shard->entries.size();
    shard->entries.push_back({tensor.name, tensor.dtype, tensor.shape, begin, tensor.bytes});
    begin += tensor.bytes;
  }
}

// All strings in it have a fixed width, so the header's size is known before its content.
std::string TensorWriter::Header(const Shard& shard, const std::vector<uint64_t>& digests,
                                 const ShardNote& note) const {
  std::map<std::string, std::string> metadata;
  metadata["format"] = "pt";  // Required by transformers.
  metadata[std::string(kNumberKey)] = fmt::format("{:020}", note.number);
  if (!note.marks.empty()) metadata[std::string(kMarksKey)] = note.marks;
  for (size_t i = 0; i < shard.entries.size(); ++i) {
    metadata[ChecksumKey(shard.entries[i].name)] = ChecksumText(digests[i]);
  }
  return BuildSafetensorsHeader(shard.entries, metadata);
}

Status TensorWriter::ReadNote(const SafetensorsHeader& header, ShardNote* note) {
  Status malformed(Code::kMalformedFile, "not a note");
  const auto number = header.metadata.find(std::string(kNumberKey));
  if (number == header.metadata.end()) return malformed;
  const std::string& text = number->second;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), note->number);
  if (parsed.ec != std::errc()) return malformed;
  const auto marks = header.metadata.find(std::string(kMarksKey));
  note->marks = marks == header.metadata.end() ? "" : marks->second;
  return {};
}

Status TensorWriter::FindFinishedImpl(Shard& shard, ShardNote* note) {
  Status differs(Code::kMalformedFile, shard.name + ": not the shard of this run");
  const std::string path = JoinPath(directory_, shard.name);
  MARLIN_ASSIGN_OR_RETURN(const FileInfo info, io_.StatLink(path));
  if (info.kind != FileKind::kRegular) return differs;
  MARLIN_ASSIGN_OR_RETURN(const std::shared_ptr<const Mapping> mapping, io_.Map(path));
  const std::span<const std::byte> image(mapping->data(), static_cast<size_t>(mapping->size()));
  MARLIN_ASSIGN_OR_RETURN(const SafetensorsHeader header,
                          ParseSafetensors(image, path, shard.name));
  std::vector<SafetensorsEntry> expected = shard.entries;
  std::sort(expected.begin(), expected.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  if (header.tensors.size() != expected.size()) return differs;
  for (size_t i = 0; i < expected.size(); ++i) {
    const TensorInfo& tensor = header.tensors[i];
    if (!SameEntry(tensor, expected[i], header.data_begin)) return differs;
    const std::string_view data = mapping->text().substr(static_cast<size_t>(tensor.offset),
                                                         static_cast<size_t>(tensor.bytes));
    const auto stored = header.metadata.find(ChecksumKey(tensor.name));
    if (stored == header.metadata.end()) return differs;
    if (stored->second != ChecksumText(ChecksumOf(data))) return differs;
    mapping->Release(tensor.offset, tensor.bytes);
  }
  if (!ReadNote(header, note).ok()) return differs;
  if (note->marks.size() != (has_marks_ ? shard.unit_count : 0)) return differs;
  shard.file = info;
  return {};
}

bool TensorWriter::FindFinished(size_t shard, ShardNote* note) {
  return FindFinishedImpl(shards_[shard], note).ok();
}

Status TensorWriter::BeginShard(size_t shard) {
  current_ = shard;
  const Shard& layout = shards_[shard];
  const std::string path = JoinPath(directory_, layout.name);
  MARLIN_RETURN_IF_ERROR(io_.RemoveTree(path));
  MARLIN_ASSIGN_OR_RETURN(file_, io_.Create(path));
  const std::vector<uint64_t> digests(layout.entries.size(), 0);
  const ShardNote note{0, std::string(has_marks_ ? layout.unit_count : 0, '0')};
  data_begin_ = static_cast<int64_t>(Header(layout, digests, note).size());
  written_.assign(layout.entries.size(), 0);
  checksums_.clear();
  checksums_.resize(layout.entries.size());
  return {};
}

Status TensorWriter::Append(size_t unit, size_t tensor, const void* data, int64_t bytes) {
  const Shard& shard = shards_[current_];
  const size_t index = shard.entry_of[unit - shard.first_unit][tensor];
  const SafetensorsEntry& entry = shard.entries[index];
  if (bytes > entry.bytes - written_[index]) {
    return Status(Code::kInternal,
                  fmt::format("tensor \"{}\": {} bytes appended to {} of {}", Printable(entry.name),
                              bytes, written_[index], entry.bytes));
  }
  if (bytes == 0) return {};
  checksums_[index].Update(data, bytes);
  MARLIN_RETURN_IF_ERROR(
      io_.Write(file_, data_begin_ + entry.begin + written_[index], data, bytes));
  written_[index] += bytes;
  return {};
}

Status TensorWriter::EndShard(const ShardNote& note) {
  Shard& shard = shards_[current_];
  std::vector<uint64_t> digests;
  for (size_t i = 0; i < shard.entries.size(); ++i) {
    if (written_[i] != shard.entries[i].bytes) {
      return Status(Code::kInternal, fmt::format("tensor \"{}\": {} of {} bytes written",
                                                 Printable(shard.entries[i].name), written_[i],
                                                 shard.entries[i].bytes));
    }
    digests.push_back(checksums_[i].Digest());
  }
  const std::string header = Header(shard, digests, note);
  if (static_cast<int64_t>(header.size()) != data_begin_) {
    return Status(Code::kInternal, fmt::format("{}: header of {} bytes, {} were reserved",
                                               shard.name, header.size(), data_begin_));
  }
  MARLIN_RETURN_IF_ERROR(io_.Write(file_, 0, header.data(), static_cast<int64_t>(header.size())));
  MARLIN_ASSIGN_OR_RETURN(shard.file, io_.SyncAndClose(std::move(file_)));
  return {};
}

std::string TensorWriter::IndexJson() const {
  if (shards_.size() == 1) return {};
  Json weight_map = Json::object();
  for (const Shard& shard : shards_) {
    for (const SafetensorsEntry& entry : shard.entries) weight_map[entry.name] = shard.name;
  }
  const Json index = {{"metadata", {{"total_size", total_bytes_}}},
                      {"weight_map", std::move(weight_map)}};
  return DumpJson(index, 2) + "\n";
}

}  // namespace marlin
