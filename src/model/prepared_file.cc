#include "model/prepared_file.h"

#include <fmt/core.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/checked.h"
#include "base/macros.h"
#include "checkpoint/files/checksum.h"
#include "checkpoint/files/object_reader.h"
#include "layout/weights_buffer.h"

namespace marlin {
namespace {

static_assert(std::endian::native == std::endian::little, "the head is written as raw bytes");

constexpr std::string_view kMagic = "MRLNPREP";
constexpr int64_t kAlignment = 64;
// A projection's name joins at most three tensor names.
constexpr int64_t kMaxProjectionBytes = 8192;

struct Head {
  std::array<char, 8> magic{};
  uint64_t version = 0;
  uint64_t index_begin = 0;
  uint64_t index_bytes = 0;
  uint64_t file_bytes = 0;
  uint64_t index_checksum = 0;
  uint64_t reserved = 0;
  uint64_t head_checksum = 0;  ///< Covers all fields above.
};
static_assert(sizeof(Head) == 64);

uint64_t ChecksumOfHead(const Head& head) {
  return ChecksumOf({reinterpret_cast<const char*>(&head), offsetof(Head, head_checksum)});
}

Status WithPath(const std::string& path, Code code, const std::string& message) {
  return Status(code, fmt::format("{}: {}", Printable(path), message));
}

Json PartJson(const PreparedPart& part) {
  const WeightsSpec& spec = part.spec;
  Json json = {{"format", FormatName(spec.format)},
               {"k", static_cast<uint64_t>(spec.k)},
               {"n", static_cast<uint64_t>(spec.n)},
               {"group_size", static_cast<uint64_t>(spec.group_size)},
               {"scale_type", ScaleTypeName(spec.scale_type)},
               {"zeros", spec.has_zeros},
               {"biases", spec.has_biases},
               {"zero_type", ScaleTypeName(spec.zero_type)},
               {"global_scale", spec.has_global_scale},
               {"global_scale_divides", spec.global_scale_divides}};
  if (spec.sparsity != Sparsity::kDense) json["sparsity"] = SparsityName(spec.sparsity);
  if (spec.has_permutation) json["permutation"] = true;
  if (spec.has_input_scale) json["input_scale"] = true;
  if (spec.input_hadamard > 0) json["input_hadamard"] = static_cast<uint64_t>(spec.input_hadamard);
  if (spec.super_group_size > 0) {
    json["super_group_size"] = static_cast<uint64_t>(spec.super_group_size);
  }
  json["bytes"] = static_cast<uint64_t>(part.bytes);
  json["checksum"] = ChecksumText(part.checksum);
  return json;
}

/// `json` is the reader's object.
Result<WeightsSpec> ParseSpec(ObjectReader& reader, const Json& json) {
  const auto in_reader = [&reader](const Status& status) { return reader.Fail(status.message()); };
  WeightsSpec spec;
  MARLIN_ASSIGN_OR_RETURN(const std::string format, reader.TakeString("format"));
  const Result<Format> parsed_format = ParseFormat(format);
  if (!parsed_format.ok()) return in_reader(parsed_format.status());
  spec.format = *parsed_format;
  MARLIN_ASSIGN_OR_RETURN(spec.k, reader.TakeDimension("k"));
  MARLIN_ASSIGN_OR_RETURN(spec.n, reader.TakeDimension("n"));
  MARLIN_ASSIGN_OR_RETURN(spec.group_size, reader.TakeDimension("group_size"));
  MARLIN_ASSIGN_OR_RETURN(const std::string scale_type, reader.TakeString("scale_type"));
  const Result<ScaleType> parsed_type = ParseScaleType(scale_type);
  if (!parsed_type.ok()) return in_reader(parsed_type.status());
  spec.scale_type = *parsed_type;
  MARLIN_ASSIGN_OR_RETURN(spec.has_zeros, reader.TakeBool("zeros"));
  MARLIN_ASSIGN_OR_RETURN(const std::string zero_type, reader.TakeString("zero_type"));
  const Result<ScaleType> parsed_zero = ParseScaleType(zero_type);
  if (!parsed_zero.ok()) return in_reader(parsed_zero.status());
  spec.zero_type = *parsed_zero;
  MARLIN_ASSIGN_OR_RETURN(spec.has_biases, reader.TakeBool("biases"));
  MARLIN_ASSIGN_OR_RETURN(spec.has_global_scale, reader.TakeBool("global_scale"));
  MARLIN_ASSIGN_OR_RETURN(spec.global_scale_divides, reader.TakeBool("global_scale_divides"));
  if (json.contains("sparsity")) {
    MARLIN_ASSIGN_OR_RETURN(const std::string sparsity, reader.TakeString("sparsity"));
    const Result<Sparsity> parsed_sparsity = ParseSparsity(sparsity);
    if (!parsed_sparsity.ok()) return in_reader(parsed_sparsity.status());
    spec.sparsity = *parsed_sparsity;
  }
  if (json.contains("permutation")) {
    MARLIN_ASSIGN_OR_RETURN(spec.has_permutation, reader.TakeBool("permutation"));
  }
  if (json.contains("input_scale")) {
    MARLIN_ASSIGN_OR_RETURN(spec.has_input_scale, reader.TakeBool("input_scale"));
  }
  if (json.contains("input_hadamard")) {
    MARLIN_ASSIGN_OR_RETURN(spec.input_hadamard, reader.TakeDimension("input_hadamard"));
  }
  if (json.contains("super_group_size")) {
    MARLIN_ASSIGN_OR_RETURN(spec.super_group_size, reader.TakeDimension("super_group_size"));
  }
  if (const Status possible = CheckSpec(spec); !possible.ok()) return in_reader(possible);
  return spec;
}

Result<uint64_t> ParseDigits(ObjectReader& reader, const std::string& key) {
  MARLIN_ASSIGN_OR_RETURN(const std::string text, reader.TakeString(key));
  constexpr std::string_view kPrefix = "xxh3:";
  uint64_t value = 0;
  const char* end = text.data() + text.size();
  if (text.starts_with(kPrefix) && text.size() == kPrefix.size() + 16) {
    const auto parsed = std::from_chars(text.data() + kPrefix.size(), end, value, 16);
    if (parsed.ec == std::errc() && parsed.ptr == end) return value;
  }
  return reader.Fail(fmt::format("\"{}\": \"{}\" is not xxh3 and 16 digits", key, Printable(text)));
}

}  // namespace

std::string BuildPreparedHead(uint64_t version, int64_t index_begin, std::string_view index) {
  Head head;
  std::memcpy(head.magic.data(), kMagic.data(), kMagic.size());
  head.version = version;
  head.index_begin = static_cast<uint64_t>(index_begin);
  head.index_bytes = index.size();
  head.file_bytes = head.index_begin + head.index_bytes;
  head.index_checksum = ChecksumOf(index);
  head.head_checksum = ChecksumOfHead(head);
  return std::string(reinterpret_cast<const char*>(&head), sizeof(head));
}

bool IsPreparedFile(Io& io, const std::string& path) {
  const Result<FileInfo> info = io.Stat(path);
  if (!info.ok() || info->kind != FileKind::kRegular) return false;
  const Result<std::shared_ptr<const Mapping>> mapping = io.Map(path);
  return mapping.ok() && (*mapping)->text().starts_with(kMagic);
}

Status PreparedFile::Malformed(const std::string& message) const {
  return WithPath(path_, Code::kMalformedFile, message);
}

Result<std::shared_ptr<const PreparedFile>> PreparedFile::Open(Io& io, const std::string& path) {
  auto file = std::make_shared<PreparedFile>();
  file->path_ = path;
  MARLIN_ASSIGN_OR_RETURN(file->mapping_, io.Map(path));
  const int64_t size = file->mapping_->size();
  Head head;
  if (size < kPreparedDataBegin || !file->mapping_->text().starts_with(kMagic)) {
    return file->Malformed("is not a file of prepared weights");
  }
  std::memcpy(&head, file->mapping_->data(), sizeof(head));
  if (ChecksumOfHead(head) != head.head_checksum) {
    return file->Malformed("the head does not have its checksum");
  }
  if (head.version != kPreparedVersion) {
    return WithPath(path, Code::kUnsupported,
                    fmt::format("version {} of prepared weights, this build reads {}: prepare them "
                                "again",
                                head.version, kPreparedVersion));
  }
  if (head.file_bytes != static_cast<uint64_t>(size)) {
    return file->Malformed(fmt::format("expected {} bytes, got {}", head.file_bytes, size));
  }
  const auto index_end =
      (Checked::FromUnsigned(head.index_begin) + Checked::FromUnsigned(head.index_bytes)).Take();
  if (!index_end || *index_end != size || head.index_begin < kPreparedDataBegin ||
      head.reserved != 0) {
    return file->Malformed(fmt::format("an index of {} bytes at {} does not end the {} bytes",
                                       head.index_bytes, head.index_begin, size));
  }
  const auto begin = static_cast<int64_t>(head.index_begin);
  const std::string_view text = file->mapping_->text().substr(static_cast<size_t>(begin));
  if (static_cast<int64_t>(text.size()) > kCheckpointJson.bytes) {
    return file->Malformed(fmt::format("an index of {} bytes, at most {} are read", text.size(),
                                       kCheckpointJson.bytes));
  }
  if (ChecksumOf(text) != head.index_checksum) {
    return file->Malformed("the index does not have its checksum");
  }
  MARLIN_RETURN_IF_ERROR(file->ReadIndex(begin, text));
  return std::shared_ptr<const PreparedFile>(std::move(file));
}

Status PreparedFile::ReadIndex(int64_t begin, std::string_view text) {
  MARLIN_ASSIGN_OR_RETURN(const Json index, ParseJsonObject(text, path_));
  ObjectReader reader(index, Printable(path_));
  MARLIN_ASSIGN_OR_RETURN(layout_, reader.TakeString("layout"));
  MARLIN_ASSIGN_OR_RETURN(source_, reader.TakeString("source"));
  MARLIN_ASSIGN_OR_RETURN(const Json* projections, reader.Take("projections"));
  MARLIN_RETURN_IF_ERROR(reader.CheckAllTaken());
  if (!projections->is_array()) return reader.WrongType("projections", "an array", *projections);
  int64_t offset = kPreparedDataBegin;
  for (const Json& projection : *projections) {
    MARLIN_RETURN_IF_ERROR(AddProjection(projection, begin, &offset));
  }
  if (offset == begin) return {};
  return Malformed(fmt::format("the parts end at {}, the index begins at {}", offset, begin));
}

Status PreparedFile::AddProjection(const Json& json, int64_t index_begin, int64_t* offset) {
  if (!json.is_object()) {
    return Malformed(fmt::format("a projection: expected an object, got {}", json.type_name()));
  }
  ObjectReader reader(json, Printable(path_));
  MARLIN_ASSIGN_OR_RETURN(const std::string name, reader.TakeString("name"));
  MARLIN_ASSIGN_OR_RETURN(const Json* parts, reader.Take("parts"));
  MARLIN_RETURN_IF_ERROR(reader.CheckAllTaken());
  if (!parts->is_array() || parts->empty()) {
    return reader.WrongType("parts", "an array of parts", *parts);
  }
  const auto [place, inserted] = projections_.emplace(name, Range{parts_.size(), parts->size()});
  if (!inserted) return Malformed(fmt::format("two projections \"{}\"", Printable(name)));
  const std::string where = fmt::format("{}: projection \"{}\"", Printable(path_), Printable(name));
  for (const Json& entry : *parts) {
    ObjectReader part_reader(entry, where);
    if (!entry.is_object()) return part_reader.Fail("a part is not an object");
    PreparedPart part;
    MARLIN_ASSIGN_OR_RETURN(part.spec, ParseSpec(part_reader, entry));
    MARLIN_ASSIGN_OR_RETURN(const Json* bytes, part_reader.Take("bytes"));
    if (!bytes->is_number_unsigned()) {
      return part_reader.WrongType("bytes", "a non-negative integer", *bytes);
    }
    MARLIN_ASSIGN_OR_RETURN(part.checksum, ParseDigits(part_reader, "checksum"));
    MARLIN_RETURN_IF_ERROR(part_reader.CheckAllTaken());
    // Parts are contiguous, so that their extents cannot overlap.
    const Checked size = Checked::FromUnsigned(bytes->get<uint64_t>());
    const auto end = (Checked(*offset) + size + Checked(kAlignment - 1)).Take();
    if (!end || *end / kAlignment * kAlignment > index_begin) {
      return part_reader.Fail(fmt::format("{} bytes at {} reach past the parts, which end at {}",
                                          bytes->get<uint64_t>(), *offset, index_begin));
    }
    part.offset = *offset;
    part.bytes = *size.Take();
    if (part.bytes < InputTransformBytes(part.spec)) {
      return part_reader.Fail(fmt::format("{} bytes do not hold an input transform of {}",
                                          part.bytes, InputTransformBytes(part.spec)));
    }
    *offset = *end / kAlignment * kAlignment;
    parts_.push_back(part);
  }
  return {};
}

Result<std::span<const PreparedPart>> PreparedFile::Find(const std::string& name) const {
  const auto found = projections_.find(name);
  if (found == projections_.end()) {
    return Malformed(fmt::format("holds no prepared weights of \"{}\"", Printable(name)));
  }
  return std::span(parts_).subspan(found->second.first, found->second.count);
}

Status PreparedFile::VerifyChecksums() const {
  for (const auto& [name, range] : projections_) {
    for (size_t i = range.first; i < range.first + range.count; ++i) {
      const PreparedPart& part = parts_[i];
      const std::span<const std::byte> data = Bytes(part);
      const uint64_t actual = ChecksumOf({reinterpret_cast<const char*>(data.data()), data.size()});
      mapping_->Release(part.offset, part.bytes);
      if (actual == part.checksum) continue;
      return Malformed(
          fmt::format("projection \"{}\": its {} bytes at {} have checksum {}, stored "
                      "is {}",
                      Printable(name), part.bytes, part.offset, ChecksumText(actual),
                      ChecksumText(part.checksum)));
    }
  }
  return {};
}

Status PreparedFileWriter::CheckTarget(bool overwrite) {
  MARLIN_ASSIGN_OR_RETURN(const FileInfo directory, io_.Stat(directory_));
  if (directory.kind != FileKind::kDirectory) {
    return WithPath(directory_, Code::kIo, "no such directory");
  }
  MARLIN_ASSIGN_OR_RETURN(const FileInfo target, io_.StatLink(path_));
  if (target.kind == FileKind::kMissing) return {};
  if (!overwrite) return WithPath(path_, Code::kInvalidArgument, "exists already; see --overwrite");
  if (target.kind != FileKind::kRegular || !IsPreparedFile(io_, path_)) {
    return WithPath(path_, Code::kInvalidArgument,
                    "is not a file of prepared weights, and is not replaced");
  }
  replaces_ = true;
  return {};
}

Result<std::unique_ptr<PreparedFileWriter>> PreparedFileWriter::Begin(Io& io,
                                                                      const std::string& path,
                                                                      bool overwrite) {
  std::unique_ptr<PreparedFileWriter> writer(new PreparedFileWriter(io, path));
  const size_t slash = path.rfind('/');
  const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  writer->directory_ = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  if (name.empty() || name == "." || name == "..") {
    return WithPath(path, Code::kInvalidArgument, "is not the name of a file");
  }
  MARLIN_RETURN_IF_ERROR(writer->CheckTarget(overwrite));
  // The pid keeps processes apart; a killed process with the same pid may have left a file.
  writer->partial_ = JoinPath(writer->directory_, fmt::format(".{}.partial-{}", name, getpid()));
  MARLIN_RETURN_IF_ERROR(io.RemoveTree(writer->partial_));
  MARLIN_ASSIGN_OR_RETURN(writer->file_, io.Create(writer->partial_));
  writer->created_ = true;
  writer->offset_ = kPreparedDataBegin;
  return writer;
}

PreparedFileWriter::~PreparedFileWriter() {
  if (created_) (void)io_.RemoveTree(partial_);
}

Status PreparedFileWriter::AddProjection(const std::string& name) {
  if (static_cast<int64_t>(name.size()) > kMaxProjectionBytes) {
    return WithPath(path_, Code::kUnsupported,
                    fmt::format("projection \"{}\" has a name of {} bytes, at most {} are written",
                                Printable(name), name.size(), kMaxProjectionBytes));
  }
  projections_.emplace_back(name, std::vector<PreparedPart>());
  return {};
}

Status PreparedFileWriter::AddPart(const WeightsSpec& spec, std::span<const std::byte> data,
                                   std::span<const std::byte> input) {
  Checksum checksum;
  PreparedPart part{.spec = spec, .offset = offset_};
  for (const std::span<const std::byte> piece : {data, input}) {
    const auto size = static_cast<int64_t>(piece.size());
    if (size == 0) continue;
    MARLIN_RETURN_IF_ERROR(io_.Write(file_, offset_ + part.bytes, piece.data(), size));
    checksum.Update(piece.data(), size);
    part.bytes += size;
  }
  part.checksum = checksum.Digest();
  projections_.back().second.push_back(part);
  offset_ = RoundUp(offset_ + part.bytes, kAlignment);
  return {};
}

Status PreparedFileWriter::Finish(const std::string& layout, const std::string& source) {
  Json projections = Json::array();
  for (const auto& [name, parts] : projections_) {
    Json entries = Json::array();
    for (const PreparedPart& part : parts) entries.push_back(PartJson(part));
    projections.push_back({{"name", name}, {"parts", std::move(entries)}});
  }
  const std::string index =
      DumpJson({{"layout", layout}, {"source", source}, {"projections", std::move(projections)}});
  if (static_cast<int64_t>(index.size()) > kCheckpointJson.bytes) {
    return WithPath(path_, Code::kUnsupported,
                    fmt::format("would have an index of {} bytes, at most {} are read",
                                index.size(), kCheckpointJson.bytes));
  }
  const std::string head = BuildPreparedHead(kPreparedVersion, offset_, index);
  MARLIN_RETURN_IF_ERROR(
      io_.Write(file_, offset_, index.data(), static_cast<int64_t>(index.size())));
  // The head is written last: without it the file is invalid.
  MARLIN_RETURN_IF_ERROR(io_.Write(file_, 0, head.data(), static_cast<int64_t>(head.size())));
  offset_ += static_cast<int64_t>(index.size());
  MARLIN_RETURN_IF_ERROR(io_.SyncAndClose(std::move(file_)).status());
  MARLIN_RETURN_IF_ERROR(replaces_ ? io_.Exchange(partial_, path_)
                                   : io_.RenameNew(partial_, path_));
  // After an exchange the hidden name holds the old file.
  if (replaces_) MARLIN_RETURN_IF_ERROR(io_.RemoveTree(partial_));
  created_ = false;
  return io_.SyncDirectory(directory_);
}

}  // namespace marlin
