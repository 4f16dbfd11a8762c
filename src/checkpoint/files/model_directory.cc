#include "checkpoint/files/model_directory.h"

#include <fmt/core.h>

#include <string_view>

#include "base/macros.h"

namespace marlin {
namespace {

bool IsBelow(std::string_view path, std::string_view directory) {
  if (directory == "/") return true;
  return path.starts_with(directory) && path.substr(directory.size()).starts_with('/');
}

/// Whether a path is of the files of a model in the Hugging Face cache:
/// "X/models--ORG--NAME/blobs/Y" or "X/models--ORG--NAME/snapshots/Y".
bool IsInCache(std::string_view path) {
  constexpr std::string_view kModel = "/models--";
  for (size_t at = path.find(kModel); at != std::string_view::npos;
       at = path.find(kModel, at + 1)) {
    const size_t end = path.find('/', at + 1);
    if (end == std::string_view::npos) return false;
    const std::string_view rest = path.substr(end);
    if (rest.starts_with("/blobs/") || rest.starts_with("/snapshots/")) return true;
  }
  return false;
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
  if (IsBelow(to, from) || IsInCache(to)) return {};
  return Status(Code::kUnsupported,
                fmt::format("{}: is a link to {}, outside of the model's directory: copy the file",
                            Printable(path), Printable(to)));
}

}  // namespace marlin
