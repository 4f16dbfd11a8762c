#include "marlin/status.h"

#include <cstdio>
#include <cstdlib>

#include "base/printable.h"

namespace marlin {

Status::Status(Code code, std::string_view message)
    : code_(code), message_(Printable(message, kMaxMessageBytes)) {}

std::string_view CodeName(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidArgument:
      return "invalid argument";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kMalformedFile:
      return "malformed file";
    case Code::kNonFiniteInput:
      return "non-finite input";
    case Code::kOutOfMemory:
      return "out of memory";
    case Code::kIo:
      return "i/o error";
    case Code::kDeviceLost:
      return "device lost";
    case Code::kInternal:
      return "internal error";
  }
  return "unknown";
}

void EndWithoutValue(const Status& status) {
  std::fprintf(stderr, "marlin: the value of a failed result was taken: %s\n",
               status.message().c_str());
  std::abort();
}

}  // namespace marlin
