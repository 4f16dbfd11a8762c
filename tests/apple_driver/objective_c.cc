#include "objective_c.h"

#include <dispatch/dispatch.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#if !defined(__x86_64__)
#error "objc_msgSend below is for x86-64"
#endif

namespace marlin::fake_objc {
namespace {

/// All shared state, created on first use: metal-cpp looks up its selectors before main.
struct Shared {
  std::mutex mutex;
  std::set<std::string> selectors;
  std::map<std::string, Object*> classes;
  std::map<std::pair<std::string, std::string>, Method> methods;
  std::map<std::string, int> living;
  /// Released objects stay allocated, so that messages to them are detected, and reachable, so that
  /// they are not reported as leaks.
  std::vector<Object*> dead;
};
Shared& TheShared() {
  static auto* shared = new Shared;
  return *shared;
}

/// The autorelease pools of this thread, the innermost last.
class Pool;
thread_local std::vector<Pool*> pools;

class Pool : public Object {
 public:
  Pool() : Object("NSAutoreleasePool") { pools.push_back(this); }
  std::vector<Object*> objects;

 protected:
  void Dispose() override {
    if (pools.empty() || pools.back() != this) Fail("a pool ends before one inside of it");
    pools.pop_back();
    for (Object* object : objects) object->Release();
  }
};

Text* NewText(const char* bytes) { return new Text(bytes); }

Object* Autoreleased(Object* object) {
  object->Autorelease();
  return object;
}

void AddFoundation() {
  Answer("NSObject", "retain", [](Object* self, SEL) {
    self->Retain();
    return self;
  });
  Answer("NSObject", "release", [](Object* self, SEL) { self->Release(); });
  Answer("NSObject", "autorelease", [](Object* self, SEL) { return Autoreleased(self); });
  Answer("NSObject", "init", [](Object* self, SEL) { return self; });
  Answer("NSObject", "respondsToSelector:", [](Object* self, SEL, SEL selector) {
    return HasMethod(*self, selector);
  });
  Answer("class NSAutoreleasePool", "alloc", [](Object*, SEL) -> Object* { return new Pool; });
  Answer("class NSString", "stringWithCString:encoding:",
         [](Object*, SEL, const char* bytes, size_t) { return Autoreleased(NewText(bytes)); });
  Answer("NSString", "UTF8String", [](Text* self, SEL) { return self->value.c_str(); });
  Answer("NSError", "localizedDescription",
         [](Error* self, SEL) { return Autoreleased(NewText(self->text.c_str())); });
  Answer("NSError", "code", [](Error* self, SEL) { return self->code; });
  Answer("class NSProcessInfo", "processInfo", [](Object*, SEL) -> Object* {
    static auto* info = new Object("NSProcessInfo");
    return info;
  });
  Answer("NSProcessInfo", "operatingSystemVersionString",
         [](Object*, SEL) { return Autoreleased(NewText("Version 0.0 (a stand-in)")); });
  Answer("NSProcessInfo", "physicalMemory", [](Object*, SEL) { return uint64_t{8} << 30; });
}

int64_t AnswerOfNothing() { return 0; }

/// Returns the method for a message to `self`; messages to nil return 0.
Method FindMethod(Object* self, SEL selector) {
  if (self == nullptr) return reinterpret_cast<Method>(&AnswerOfNothing);
  const std::string name = reinterpret_cast<const char*>(selector);
  if (!self->alive()) Fail(std::string(self->class_name()) + ": released, and then sent " + name);
  static const bool added = (AddFoundation(), true);
  (void)added;
  Shared& shared = TheShared();
  const std::lock_guard<std::mutex> lock(shared.mutex);
  for (const char* class_name : {self->class_name(), "NSObject"}) {
    const auto found = shared.methods.find({class_name, name});
    if (found != shared.methods.end()) return found->second;
  }
  Fail("-[" + std::string(self->class_name()) + " " + name + "]: nobody answers");
}

}  // namespace

Object::Object(const char* class_name) : class_name_(class_name) {
  Shared& shared = TheShared();
  const std::lock_guard<std::mutex> lock(shared.mutex);
  ++shared.living[class_name_];
}

void Object::Release() {
  const int left = --references_;
  if (left < 0) Fail(std::string(class_name_) + ": released once too often");
  if (left > 0) return;
  Dispose();
  Shared& shared = TheShared();
  const std::lock_guard<std::mutex> lock(shared.mutex);
  --shared.living[class_name_];
  shared.dead.push_back(this);
}

void Object::Autorelease() {
  if (pools.empty()) Fail(std::string(class_name_) + ": autoreleased without a pool");
  pools.back()->objects.push_back(this);
}

std::string LivingObjects() {
  Shared& shared = TheShared();
  const std::lock_guard<std::mutex> lock(shared.mutex);
  std::string text;
  for (const auto& [name, count] : shared.living) {
    // These objects are singletons that live forever, as on a Mac.
    const bool kept = name.starts_with("class ") || name == "NSProcessInfo" || name == "MTLDevice";
    if (count == 0 || kept) continue;
    text += name + " x " + std::to_string(count) + "\n";
  }
  return text;
}

void Fail(const std::string& what) {
  std::fprintf(stderr, "fake Objective-C: %s\n", what.c_str());
  std::abort();
}

bool HasMethod(const Object& object, SEL selector) {
  Shared& shared = TheShared();
  const std::lock_guard<std::mutex> lock(shared.mutex);
  return shared.methods.contains({object.class_name(), reinterpret_cast<const char*>(selector)});
}

void AddMethod(const char* class_name, const char* selector, Method method) {
  Shared& shared = TheShared();
  const std::lock_guard<std::mutex> lock(shared.mutex);
  shared.methods[{class_name, selector}] = method;
}

}  // namespace marlin::fake_objc

using marlin::fake_objc::Object;

extern "C" {

SEL sel_registerName(const char* name) {
  auto& shared = marlin::fake_objc::TheShared();
  const std::lock_guard<std::mutex> lock(shared.mutex);
  const std::string& kept = *shared.selectors.insert(name).first;
  return reinterpret_cast<SEL>(const_cast<char*>(kept.c_str()));
}

void* objc_lookUpClass(const char* name) {
  auto& shared = marlin::fake_objc::TheShared();
  {
    const std::lock_guard<std::mutex> lock(shared.mutex);
    if (const auto found = shared.classes.find(name); found != shared.classes.end()) {
      return found->second;
    }
  }
  static auto* names = new std::set<std::string>;
  Object* object = new Object(names->insert("class " + std::string(name)).first->c_str());
  const std::lock_guard<std::mutex> lock(shared.mutex);
  return shared.classes.emplace(name, object).first->second;
}

void* objc_getProtocol(const char* /*name*/) { return nullptr; }

void* marlin_fake_find_method(Object* self, SEL selector) {
  return reinterpret_cast<void*>(marlin::fake_objc::FindMethod(self, selector));
}

// Symbols that metal-cpp references for blocks and results in memory, which the driver does not
// use.
void* _NSConcreteStackBlock[32];
void _Block_object_assign(void* /*to*/, const void* /*from*/, int /*flags*/) {
  marlin::fake_objc::Fail("a block is copied");
}
void _Block_object_dispose(const void* /*object*/, int /*flags*/) {}
void objc_msgSend_stret() { marlin::fake_objc::Fail("a result in memory"); }
void objc_msgSend_fpret() { marlin::fake_objc::Fail("a result on the x87 stack"); }
}

// Finds the method with all argument registers saved, and tail-jumps to it, so arguments and return
// address are those of a direct call. 7 * 8 + 8 of the return address and 128 bytes keep the stack
// aligned to 16.
asm(R"(
.text
.globl objc_msgSend
.type objc_msgSend, @function
objc_msgSend:
  pushq %rdi
  pushq %rsi
  pushq %rdx
  pushq %rcx
  pushq %r8
  pushq %r9
  pushq %rax
  subq $128, %rsp
  movups %xmm0, (%rsp)
  movups %xmm1, 16(%rsp)
  movups %xmm2, 32(%rsp)
  movups %xmm3, 48(%rsp)
  movups %xmm4, 64(%rsp)
  movups %xmm5, 80(%rsp)
  movups %xmm6, 96(%rsp)
  movups %xmm7, 112(%rsp)
  call marlin_fake_find_method@PLT
  movq %rax, %r11
  movups (%rsp), %xmm0
  movups 16(%rsp), %xmm1
  movups 32(%rsp), %xmm2
  movups 48(%rsp), %xmm3
  movups 64(%rsp), %xmm4
  movups 80(%rsp), %xmm5
  movups 96(%rsp), %xmm6
  movups 112(%rsp), %xmm7
  addq $128, %rsp
  popq %rax
  popq %r9
  popq %r8
  popq %rcx
  popq %rdx
  popq %rsi
  popq %rdi
  jmp *%r11
.size objc_msgSend, .-objc_msgSend
)");
