// The state of the handles that users hold, for the library's own code.
#pragma once

#include <memory>
#include <utility>

namespace marlin {

/// A friend of the handles of include/marlin. The state of a handle lives as long as the handle.
struct Internals {
  /// The state of a Device or of a valid Model.
  template <typename Handle>
  static auto& Impl(const Handle& handle) {
    return *handle.impl_;
  }
  /// The state of prepared weights or experts; null if they are empty.
  template <typename Handle>
  static const auto* Storage(const Handle& handle) {
    return handle.storage_.get();
  }
  /// The state as a pointer that shares it.
  template <typename Handle>
  static const auto& Shared(const Handle& handle) {
    if constexpr (requires { handle.impl_; }) {
      return handle.impl_;
    } else {
      return handle.storage_;
    }
  }
  /// A handle to a state.
  template <typename Handle, typename State>
  static Handle Make(std::shared_ptr<State> state) {
    return Handle(std::move(state));
  }
};

}  // namespace marlin
