// A stand-in for Objective-C's runtime, as far as metal-cpp needs one: classes are names, methods
// are functions in a table. What would be silent on a Mac is fatal here: a message that no method
// answers, one to an object that has been released, an autoreleased object that no pool takes.
// x86-64 only, for the sake of objc_msgSend.
#pragma once

#include <objc/runtime.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace marlin::fake_objc {

/// Starts with one reference, its maker's.
class Object {
 public:
  explicit Object(const char* class_name);
  virtual ~Object() = default;
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  const char* class_name() const { return class_name_; }
  bool alive() const { return references_ > 0; }
  void Retain() { ++references_; }
  /// With the last reference the object gives up what it holds; its shell stays, so that messages
  /// to it are noticed.
  void Release();
  /// Releases it when the innermost pool of this thread ends.
  void Autorelease();

 protected:
  virtual void Dispose() {}

 private:
  const char* class_name_;
  std::atomic<int> references_{1};
};

/// Objects that nobody has released yet, "MTLBuffer x 2"; empty: none.
std::string LivingObjects();

[[noreturn]] void Fail(const std::string& what);

/// A counted reference.
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
};

using Method = void (*)();
/// `class_name` is "NSString" for methods of objects, "class NSString" for those of the class.
void AddMethod(const char* class_name, const char* selector, Method method);

/// What respondsToSelector: answers unless a class answers it otherwise.
bool HasMethod(const Object& object, SEL selector);

/// A method as a lambda (Class* self, SEL, arguments...).
template <typename Function>
void Answer(const char* class_name, const char* selector, Function function) {
  AddMethod(class_name, selector, reinterpret_cast<Method>(+function));
}

}  // namespace marlin::fake_objc
