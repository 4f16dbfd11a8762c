// Of Objective-C's runtime what metal-cpp names; objective_c.cc stands in for it.
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
