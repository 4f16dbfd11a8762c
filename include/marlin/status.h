// Errors as values: no function of this library throws across its public boundary.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#pragma GCC visibility push(default)
namespace marlin {

/// Error codes. The numbers are stable.
enum class Code : uint8_t {
  kOk = 0,
  kInvalidArgument = 1,  ///< An invalid argument: a shape, a name, an option.
  kUnsupported = 2,      ///< Valid, but no implementation exists; the message says why.
  kMalformedFile = 3,    ///< A file's content violates its format.
  kNonFiniteInput = 4,   ///< NaN or Inf where only finite numbers are meaningful.
  kOutOfMemory = 5,
  kIo = 6,          ///< The operating system refused to open, read, write or rename.
  kDeviceLost = 7,  ///< The device failed; every later call on it returns the same.
  kInternal = 8,    ///< A violated invariant of this library: a bug.
};

/// Returns the name of a code, e.g. "malformed file".
std::string_view CodeName(Code code);

/// Success, or an error code with a one-line message that names the argument and both numbers.
class [[nodiscard]] Status {
 public:
  Status() = default;
  /// Sanitizes the message, which may quote untrusted text: one line of valid UTF-8, truncated to 4
  /// KiB with "...". Control characters, bidirectional formatting characters and invalid UTF-8
  /// bytes become \xNN.
  Status(Code code, std::string_view message);

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

  /// Returns the same error with its message prefixed by "context: "; success is unchanged.
  Status WithContext(std::string_view context) const {
    if (ok()) return *this;
    std::string message(context);
    message += ": ";
    message += message_;
    return Status(code_, message);
  }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

/// Prints the error to stderr and terminates the process, because the value of a Result without one
/// was accessed. Not declared [[noreturn]], although it never returns: g++ 12 would warn about
/// moved-from strings.
void EndWithoutValue(const Status& status);

/// A value of type T, or the error that explains its absence.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}  // NOLINT(google-explicit-constructor)
  /// An ok Status does not explain the missing value and becomes kInternal.
  Result(Status status)  // NOLINT(google-explicit-constructor)
      : state_(status.ok()
                   ? Status(Code::kInternal, "a result without a value and without an error")
                   : std::move(status)) {}

  bool ok() const { return std::holds_alternative<T>(state_); }
  explicit operator bool() const { return ok(); }
  Status status() const { return ok() ? Status() : std::get<Status>(state_); }

  /// The value. Precondition: ok(); otherwise the process terminates with the error on stderr.
  T& operator*() & { return *Value(); }
  const T& operator*() const& { return *Value(); }
  T&& operator*() && { return std::move(*Value()); }
  T* operator->() { return Value(); }
  const T* operator->() const { return Value(); }

 private:
  T* Value() {
    if (!ok()) EndWithoutValue(std::get<Status>(state_));
    return std::get_if<T>(&state_);
  }
  const T* Value() const {
    if (!ok()) EndWithoutValue(std::get<Status>(state_));
    return std::get_if<T>(&state_);
  }
  std::variant<T, Status> state_;
};

}  // namespace marlin
#pragma GCC visibility pop
