// The part of Objective-C's runtime that metal-cpp uses; implemented in objective_c.cc.
#pragma once

#include <cstddef>
#include <cstdint>

using SEL = struct objc_selector*;
struct objc_object {
  void* isa;
};

extern "C" {
SEL sel_registerName(const char* name);
void* objc_lookUpClass(const char* name);
void* objc_getProtocol(const char* name);
}
