// metal-cpp, Apple's C++ interface to Metal, and the driver's helpers for it.
#pragma once

#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>
#include <string>

namespace marlin::metal {

/// Autorelease pool of a scope: its end releases the objects autoreleased on this thread since its
/// begin. A caller's threads have no pool of their own and would never release them.
class AutoreleaseScope {
 public:
  AutoreleaseScope() : pool_(NS::AutoreleasePool::alloc()->init()) {}
  ~AutoreleaseScope() { pool_->release(); }
  AutoreleaseScope(const AutoreleaseScope&) = delete;
  AutoreleaseScope& operator=(const AutoreleaseScope&) = delete;

 private:
  NS::AutoreleasePool* pool_;
};

/// Whether an object responds to a selector, for methods that the oldest supported system lacks.
class Responds : private NS::Object {
 public:
  static bool To(const void* object, const char* selector) {
    return respondsToSelector(object, sel_registerName(selector));
  }
};

/// Autoreleased.
inline NS::String* MakeText(const std::string& text) {
  return NS::String::string(text.c_str(), NS::UTF8StringEncoding);
}
inline std::string TextOf(const NS::String* text) {
  const char* bytes = text == nullptr ? nullptr : text->utf8String();
  return bytes == nullptr ? std::string() : std::string(bytes);
}
inline std::string TextOf(const NS::Error* error) {
  const std::string text = error == nullptr ? "" : TextOf(error->localizedDescription());
  return text.empty() ? "Metal gives no reason" : text;
}

}  // namespace marlin::metal
