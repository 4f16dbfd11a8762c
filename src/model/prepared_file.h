// Prepared-weight files in a device's layout: docs/formats/prepared.md. Weights that a loader
// prepared once are mapped the next time, without being read, checked or copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "checkpoint/files/io.h"
#include "layout/input_transform.h"
#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

inline constexpr uint64_t kPreparedVersion = 2;
/// File offset of the first weights.
inline constexpr int64_t kPreparedDataBegin = 4096;

/// The first bytes of a file of this version whose index occupies the end of the file, from
/// `index_begin`.
std::string BuildPreparedHead(uint64_t version, int64_t index_begin, std::string_view index);

/// True when the file begins like a prepared-weight file.
bool IsPreparedFile(Io& io, const std::string& path);

/// A column range of a projection, prepared as one matrix.
struct PreparedPart {
  WeightsSpec spec;
  int64_t offset = 0;  ///< File offset; a multiple of 64.
  int64_t bytes = 0;   ///< Bytes of the matrix, then of its input transform.
  uint64_t checksum = 0;
};

/// An opened file: mapped; head, index and all extents checked, the weights' bytes not read.
class PreparedFile {
 public:
  /// Errors: kIo, kMalformedFile, kUnsupported for another version; each names the file.
  static Result<std::shared_ptr<const PreparedFile>> Open(Io& io, const std::string& path);

  const std::string& path() const { return path_; }
  /// Backend::ImageLayout of the target device.
  const std::string& layout() const { return layout_; }
  /// Identifies the model's files, as Fingerprint of checkpoint/convert/conversion.h.
  const std::string& source() const { return source_; }
  /// All parts, in file order.
  const std::vector<PreparedPart>& parts() const { return parts_; }

  /// The parts of a projection. Errors: kMalformedFile naming a missing projection.
  Result<std::span<const PreparedPart>> Find(const std::string& name) const;
  std::span<const std::byte> Data(const PreparedPart& part) const {
    return Bytes(part).first(static_cast<size_t>(part.bytes - InputTransformBytes(part.spec)));
  }
  /// PreparedImage::input of the part.
  std::span<const std::byte> Input(const PreparedPart& part) const {
    return Bytes(part).last(static_cast<size_t>(InputTransformBytes(part.spec)));
  }
  /// Verifies the checksum of every part. Errors: kMalformedFile naming the projection.
  Status VerifyChecksums() const;

 private:
  std::span<const std::byte> Bytes(const PreparedPart& part) const {
    return {mapping_->data() + part.offset, static_cast<size_t>(part.bytes)};
  }
  Status ReadIndex(int64_t begin, std::string_view text);
  Status AddProjection(const Json& json, int64_t index_begin, int64_t* offset);
  Status Malformed(const std::string& message) const;

  std::string path_;
  std::shared_ptr<const Mapping> mapping_;
  std::string layout_;
  std::string source_;
  std::vector<PreparedPart> parts_;
  struct Range {
    size_t first = 0;
    size_t count = 0;
  };
  std::map<std::string, Range, std::less<>> projections_;
};

/// Writes such a file under a hidden name in the target's directory, and renames it at the end.
class PreparedFileWriter {
 public:
  /// Errors: kInvalidArgument for an existing path, unless `overwrite` is set and it is a prepared
  /// file; kIo.
  static Result<std::unique_ptr<PreparedFileWriter>> Begin(Io& io, const std::string& path,
                                                           bool overwrite);
  PreparedFileWriter(const PreparedFileWriter&) = delete;
  PreparedFileWriter& operator=(const PreparedFileWriter&) = delete;
  /// Removes the hidden file unless Finish succeeded.
  ~PreparedFileWriter();

  /// Starts a projection; AddPart calls for its parts follow.
  Status AddProjection(const std::string& name);
  Status AddPart(const WeightsSpec& spec, std::span<const std::byte> data,
                 std::span<const std::byte> input = {});
  /// Writes index and head, flushes, and renames the file into place.
  Status Finish(const std::string& layout, const std::string& source);

  int64_t bytes() const { return offset_; }

 private:
  PreparedFileWriter(Io& io, std::string path) : io_(io), path_(std::move(path)) {}
  Status CheckTarget(bool overwrite);

  Io& io_;
  std::string path_;
  std::string directory_;
  std::string partial_;
  FileHandle file_;
  std::vector<std::pair<std::string, std::vector<PreparedPart>>> projections_;
  int64_t offset_ = 0;
  bool created_ = false;
  bool replaces_ = false;
};

}  // namespace marlin
