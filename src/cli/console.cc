#include "cli/console.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "base/printable.h"

namespace marlin::cli {

namespace {

std::string JsonText(const nlohmann::ordered_json& json, int indent = 2) {
  // A name from a file may be invalid UTF-8; the document must still be valid.
  return json.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace

int ExitCode(Code code) {
  switch (code) {
    case Code::kOk:
      return 0;
    case Code::kInvalidArgument:
    case Code::kUnsupported:
      return 1;
    case Code::kMalformedFile:
    case Code::kNonFiniteInput:
      return 2;
    case Code::kIo:
      return 3;
    case Code::kOutOfMemory:
      return 4;
    case Code::kDeviceLost:
      return 5;
    case Code::kInternal:
      return 70;
  }
  return 70;
}

std::string ErrorName(Code code) {
  if (code == Code::kIo) return "io";  // Instead of "i/o".
  std::string name(CodeName(code));
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == ' ' || c == '-'; }, '_');
  return name;
}

Console::Console() : interactive_(isatty(STDERR_FILENO) == 1) {
  std::signal(SIGPIPE, SIG_IGN);
  // A caller may have closed a standard stream; the next opened file would then get its descriptor,
  // and messages would be written into it.
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (fcntl(fd, F_GETFD) == -1 && errno == EBADF) (void)!open("/dev/null", O_RDWR);
  }
}

Status Console::Write(std::string_view text) {
  if (collected_ != nullptr) {
    collected_->document += text;
    return Status();
  }
  errno = 0;
  const size_t written = std::fwrite(text.data(), 1, text.size(), stdout);
  if (written == text.size() && std::fflush(stdout) == 0) return Status();
  if (errno != EPIPE) {
    return Status(Code::kIo, std::string("standard output: ") + std::strerror(errno));
  }
  reader_gone_ = true;
  return Status();
}

Status Console::Print(std::string_view text) {
  return Write(EscapeUnprintable(text, Layout::kKept));
}

Status Console::PrintJson(const nlohmann::ordered_json& document) {
  printed_document_ = true;
  return Write(JsonText(document) + "\n");
}

Status Console::PrintJsonLine(const nlohmann::ordered_json& document) {
  printed_document_ = true;
  return Write(JsonText(document, -1) + "\n");
}

Status Console::PrintJson(const nlohmann::ordered_json& document, std::string_view key, size_t rows,
                          const std::function<nlohmann::ordered_json(size_t)>& row) {
  printed_document_ = true;
  constexpr size_t kChunk = size_t{1} << 16;
  const std::string text = JsonText(document) + "\n";
  // JSON strings contain no line feeds, so this text matches nothing else in the document.
  const std::string empty = fmt::format("\n  \"{}\": []", key);
  const size_t at = text.find(empty);
  if (rows == 0 || at == std::string::npos) return Write(text);
  const size_t inside = at + empty.size() - 1;
  std::string pending = text.substr(0, inside);
  for (size_t i = 0; i < rows && !reader_gone_; ++i) {
    pending += i == 0 ? "\n    " : ",\n    ";
    for (const char c : JsonText(row(i))) {
      pending += c;
      if (c == '\n') pending += "    ";
    }
    if (pending.size() < kChunk) continue;
    MARLIN_RETURN_IF_ERROR(Write(pending));
    pending.clear();
  }
  return Write(pending + "\n  " + text.substr(inside));
}

void Console::Message(std::string_view text) {
  if (collected_ != nullptr || quiet_ || !(interactive_ || verbose_)) return;
  std::fprintf(stderr, "%s\n", EscapeUnprintable(text).c_str());
}

std::string Console::ErrorLine(const Status& status) {
  return "metal-marlin: error: " + status.message() + "\n";
}

std::string Console::ErrorDocument(const Status& status) {
  const nlohmann::ordered_json error = {{"code", ErrorName(status.code())},
                                        {"message", status.message()},
                                        {"exit_code", ExitCode(status.code())}};
  return JsonText({{"error", error}}) + "\n";
}

int Console::Finish(const Status& status) {
  if (collected_ != nullptr) {
    collected_->status = status;
    return ExitCode(status.code());
  }
  if (status.ok()) return 0;
  // If stdout cannot be written, the line on stderr still reports the error.
  if (json_ && !printed_document_) (void)Write(ErrorDocument(status));
  std::fputs(ErrorLine(status).c_str(), stderr);
  return ExitCode(status.code());
}

std::string_view ProgramName(const Console& console) {
  return console.text_codecs() ? "Python package, with tokenizers"
                               : "C++ program, without tokenizers";
}

}  // namespace marlin::cli
