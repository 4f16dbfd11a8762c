#include "checkpoint/model_directory.h"

#include <fmt/core.h>

#include <string_view>

#include "base/macros.h"

namespace marlin {
namespace {

bool IsBelow(std::string_view path, std::string_view directory) {
  if (directory == "/") return true;
  return path.starts_with(directory) && path.substr(directory.size()).starts_with('/');
}

// "X/models--ORG--NAME/snapshots/REV/..." -> "X/models--ORG--NAME/blobs"; else empty.
std::string CacheBlobs(std::string_view directory) {
  constexpr std::string_view kModels = "/models--";
  constexpr std::string_view kSnapshots = "/snapshots/";
  for (size_t at = directory.rfind(kSnapshots); at != std::string_view::npos && at > 0;
       at = directory.rfind(kSnapshots, at - 1)) {
    const std::string_view model = directory.substr(0, at);
    const size_t name = model.rfind('/');
    if (name != std::string_view::npos && model.substr(name).starts_with(kModels)) {
      return std::string(model) + "/blobs";
    }
  }
  return {};
}

}  // namespace

Status CheckModelFile(Io& io, const std::string& directory, const std::string& name) {
  const std::string path = JoinPath(directory, name);
  MARLIN_ASSIGN_OR_RETURN(const FileInfo entry, io.StatLink(path));
  if (entry.kind != FileKind::kLink) return {};
  MARLIN_ASSIGN_OR_RETURN(const FileInfo target, io.Stat(path));
  if (target.kind == FileKind::kMissing) {
    MARLIN_ASSIGN_OR_RETURN(const std::string text, io.ReadLink(path));
    return Status(Code::kIo, fmt::format("{}: is a link to {}, which does not exist",
                                         Printable(path), Printable(text)));
  }
  MARLIN_ASSIGN_OR_RETURN(const std::string from, io.RealPath(directory));
  MARLIN_ASSIGN_OR_RETURN(const std::string to, io.RealPath(path));
  const std::string blobs = CacheBlobs(from);
  if (IsBelow(to, from) || (!blobs.empty() && IsBelow(to, blobs))) return {};
  return Status(Code::kUnsupported,
                fmt::format("{}: is a link to {}, outside of the model's directory: copy the file",
                            Printable(path), Printable(to)));
}

}  // namespace marlin
