#include "cli/console.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

namespace marlin::cli {
namespace {

std::string WithoutControlCharacters(std::string_view text, bool keep_layout) {
  std::string clean(text);
  for (char& c : clean) {
    const auto byte = static_cast<unsigned char>(c);
    if (keep_layout && (c == '\n' || c == '\t')) continue;
    if (byte < 0x20 || byte == 0x7f) c = '?';
  }
  return clean;
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

Console::Console() : interactive_(isatty(STDERR_FILENO) == 1) {
  std::signal(SIGPIPE, SIG_IGN);
  // A caller may have closed a standard stream; the next file opened would take its number, and
  // messages would be written into it.
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (fcntl(fd, F_GETFD) == -1 && errno == EBADF) (void)!open("/dev/null", O_RDWR);
  }
}

Status Console::Write(std::string_view text) {
  errno = 0;
  const size_t written = std::fwrite(text.data(), 1, text.size(), stdout);
  if (written == text.size() && std::fflush(stdout) == 0) return Status();
  if (errno != EPIPE) {
    return Status(Code::kIo, std::string("standard output: ") + std::strerror(errno));
  }
  reader_gone_ = true;
  return Status();
}

Status Console::Print(std::string_view text) { return Write(WithoutControlCharacters(text, true)); }

Status Console::PrintJson(const nlohmann::ordered_json& document) {
  // A name from a file may be invalid UTF-8; the document must stay valid all the same.
  constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
  return Write(document.dump(2, ' ', false, kReplace) + "\n");
}

void Console::Message(std::string_view text) {
  if (!interactive_) return;
  std::fprintf(stderr, "%s\n", WithoutControlCharacters(text, false).c_str());
}

int Console::Finish(const Status& status) {
  if (status.ok()) return 0;
  std::fprintf(stderr, "metal-marlin: error: %s\n",
               WithoutControlCharacters(status.message(), false).c_str());
  return ExitCode(status.code());
}

}  // namespace marlin::cli
