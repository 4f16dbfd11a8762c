// A fake Objective-C runtime, limited to the functions that metal-cpp needs: classes are names,
// methods are functions in a table. Errors that are silent on a Mac are fatal here: a message
// without a method, a message to a released object, an autorelease without a pool. x86-64 only,
// because of objc_msgSend.
#pragma once

#include <objc/runtime.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace marlin::fake_objc {

/// Has a reference count of one at first, which its creator owns.
class Object {
 public:
  explicit Object(const char* class_name);
  virtual ~Object() = default;
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  const char* class_name() const { return class_name_; }
  bool alive() const { return references_ > 0; }
  void Retain() { ++references_; }
  /// On the last release the object drops its contents; its shell stays allocated, so that messages
  /// to it are detected.
  void Release();
  /// Schedules a release for the end of this thread's innermost pool.
  void Autorelease();

 protected:
  virtual void Dispose() {}

 private:
  const char* class_name_;
  std::atomic<int> references_{1};
};

/// Lists the objects that are not released yet, "MTLBuffer x 2"; empty: none.
std::string LivingObjects();

[[noreturn]] void Fail(const std::string& what);

/// A reference-counting pointer.
template <typename T>
class Reference {
 public:
  Reference() = default;
  explicit Reference(T* object) : object_(object) {
    if (object_ != nullptr) object_->Retain();
  }
  Reference(const Reference& other) : Reference(other.object_) {}
  Reference(Reference&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Reference& operator=(Reference other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Reference() {
    if (object_ != nullptr) object_->Release();
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }

 private:
  T* object_ = nullptr;
};

class Text : public Object {
 public:
  explicit Text(std::string text) : Object("NSString"), value(std::move(text)) {}
  std::string value;
};

class Error : public Object {
 public:
  Error(int64_t number, std::string message)
      : Object("NSError"), code(number), text(std::move(message)) {}
  int64_t code;
  std::string text;
  std::string blamed;  ///< The label of an encoder; empty: none.
};

using Method = void (*)();
/// `class_name` is "NSString" for instance methods, "class NSString" for class methods.
void AddMethod(const char* class_name, const char* selector, Method method);

/// The default answer of respondsToSelector:, which a class may override.
bool HasMethod(const Object& object, SEL selector);

/// Registers a lambda (Class* self, SEL, arguments...) as a method.
template <typename Function>
void Answer(const char* class_name, const char* selector, Function function) {
  AddMethod(class_name, selector, reinterpret_cast<Method>(+function));
}

}  // namespace marlin::fake_objc
