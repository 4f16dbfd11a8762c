// Names of cases that hold all of their parameters: one function lists the parts of a case, for the
// writer of names and for their reader.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "marlin/status.h"

namespace marlin::conformance {

/// The word that stands for a value in names.
template <typename T>
struct NameWord {
  std::string_view word;
  T value;
};

/// Appends parts to a name.
class NameWriter {
 public:
  template <typename T, size_t kCount>
  void Word(const NameWord<T> (&words)[kCount], T& value) {
    for (const NameWord<T>& each : words) {
      if (each.value == value) return Append(each.word);
    }
    Append("?");
  }
  template <typename T>
  void Number(std::string_view prefix, T& value) {
    Append(std::string(prefix) + std::to_string(value));
  }
  void Text(std::string& text) { Append(text); }
  /// A part that is there if the value is true.
  void Flag(std::string_view word, bool& value) {
    if (value) Append(word);
  }

  const std::string& name() const { return name_; }

 private:
  void Append(std::string_view part) {
    if (!name_.empty()) name_ += '/';
    name_ += part;
  }

  std::string name_;
};

/// Takes the parts of a name in the same order; keeps the first error.
class NameReader {
 public:
  explicit NameReader(std::string_view name) : rest_(name) {}

  template <typename T, size_t kCount>
  void Word(const NameWord<T> (&words)[kCount], T& value) {
    const std::string_view part = Next();
    for (const NameWord<T>& each : words) {
      if (each.word != part) continue;
      value = each.value;
      return Take();
    }
    Fail(NotUnderstood(part));
  }
  /// Numbers are at least 1.
  template <typename T>
  void Number(std::string_view prefix, T& value) {
    const std::string_view part = Next();
    const char* const end = part.data() + part.size();
    if (part.starts_with(prefix)) {
      const auto [stop, error] = std::from_chars(part.data() + prefix.size(), end, value);
      if (error == std::errc() && stop == end && value >= 1) return Take();
    }
    Fail("case: expected " + std::string(prefix) + "<number>, got '" + std::string(part) + "'");
  }
  void Text(std::string& text) {
    text = Next();
    Take();
  }
  void Flag(std::string_view word, bool& value) {
    value = Next() == word;
    if (value) Take();
  }

  /// kInvalidArgument naming the part that was not understood.
  Status Finish() const {
    if (!status_.ok() || rest_.empty()) return status_;
    return Status(Code::kInvalidArgument, NotUnderstood(rest_));
  }

 private:
  static std::string NotUnderstood(std::string_view part) {
    return "case: '" + std::string(part) + "' is not understood";
  }
  std::string_view Next() const { return rest_.substr(0, rest_.find('/')); }
  void Take() {
    const size_t end = rest_.find('/');
    rest_ = end == std::string_view::npos ? std::string_view() : rest_.substr(end + 1);
  }
  void Fail(std::string message) {
    if (status_.ok()) status_ = Status(Code::kInvalidArgument, std::move(message));
    Take();
  }

  std::string_view rest_;
  Status status_;
};

}  // namespace marlin::conformance
