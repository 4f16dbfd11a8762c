// Errors as values: no function of this library throws across its public boundary.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#pragma GCC visibility push(default)
namespace marlin {

/// What kind of error a Status holds. The numbers are stable.
enum class Code : uint8_t {
  kOk = 0,
  kInvalidArgument = 1,  ///< The caller passed something wrong: a shape, a name, an option.
  kUnsupported = 2,      ///< Well-formed, but no implementation exists; the message says why.
  kMalformedFile = 3,    ///< A file's content breaks its format.
  kNonFiniteInput = 4,   ///< NaN or Inf where only finite numbers have a meaning.
  kOutOfMemory = 5,
  kIo = 6,          ///< The operating system refused to open, read, write or rename.
  kDeviceLost = 7,  ///< The device failed; every later call on it returns the same.
  kInternal = 8,    ///< A broken invariant of this library: a bug.
};

/// Returns the name of a code, e.g. "malformed file".
std::string_view CodeName(Code code);

/// Success, or an error code with a one-line message that names the argument and both numbers.
class [[nodiscard]] Status {
 public:
  Status() = default;
  /// Keeps the message fit to be shown, whatever it quotes: one line of valid UTF-8 of at most 4
  /// KiB (cut with "..."). Control characters, marks of writing direction and bytes that are not
  /// UTF-8 become \xNN.
  Status(Code code, std::string_view message);

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

  /// Returns the same error with "context: " put before its message; success stays success.
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

/// Writes the error to stderr and ends the process: a program took the value of a Result that has
/// none. It never returns, but is not declared so: g++ 12 then warns of moved strings.
void EndWithoutValue(const Status& status);

/// A value of type T or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}  // NOLINT(google-explicit-constructor)
  /// A Status that is ok says nothing about the missing value and becomes kInternal.
  Result(Status status)  // NOLINT(google-explicit-constructor)
      : state_(status.ok()
                   ? Status(Code::kInternal, "a result without a value and without an error")
                   : std::move(status)) {}

  bool ok() const { return std::holds_alternative<T>(state_); }
  explicit operator bool() const { return ok(); }
  Status status() const { return ok() ? Status() : std::get<Status>(state_); }

  /// Access to the value. Precondition: ok(); otherwise the process ends with the error on stderr.
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
