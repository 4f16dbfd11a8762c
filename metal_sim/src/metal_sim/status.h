// Errors as values: no function of the simulator throws.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace metal_sim {

enum class Code : uint8_t {
  kOk,
  kInvalidArgument,  ///< The caller passed something wrong, or a source does not compile.
  kUnsupported,      ///< Well-formed, but the simulator or this machine cannot do it.
  kIo,               ///< The operating system refused to open, read, write or start something.
  kOutOfMemory,
  kInternal,  ///< A broken invariant of the simulator: a bug.
};

/// Success, or an error code with a message of one line.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string_view message) : code_(code), message_(message) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

/// A value of type T or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : state_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return std::holds_alternative<T>(state_); }
  Status status() const { return ok() ? Status() : std::get<Status>(state_); }

  /// Access to the value. Precondition: ok(); otherwise the process ends.
  T& operator*() & { return *Value(); }
  const T& operator*() const& { return *Value(); }
  T&& operator*() && { return std::move(*Value()); }
  T* operator->() { return Value(); }
  const T* operator->() const { return Value(); }

 private:
  T* Value() {
    if (!ok()) std::abort();
    return std::get_if<T>(&state_);
  }
  const T* Value() const {
    if (!ok()) std::abort();
    return std::get_if<T>(&state_);
  }
  std::variant<T, Status> state_;
};

}  // namespace metal_sim

#define METAL_SIM_CONCAT_INNER(a, b) a##b
#define METAL_SIM_CONCAT(a, b) METAL_SIM_CONCAT_INNER(a, b)

/// Returns the Status of `expr` from the enclosing function unless it is ok.
#define METAL_SIM_RETURN_IF_ERROR(expr)                    \
  do {                                                     \
    ::metal_sim::Status metal_sim_status_ = (expr);        \
    if (!metal_sim_status_.ok()) return metal_sim_status_; \
  } while (false)

/// Evaluates `expr` to a Result, returns its error, or assigns its value to `lhs`.
#define METAL_SIM_ASSIGN_OR_RETURN(lhs, expr) \
  METAL_SIM_ASSIGN_OR_RETURN_IMPL(METAL_SIM_CONCAT(metal_sim_result_, __LINE__), lhs, expr)
#define METAL_SIM_ASSIGN_OR_RETURN_IMPL(result, lhs, expr) \
  auto result = (expr);                                    \
  if (!result.ok()) return result.status();                \
  lhs = std::move(*result)
