// Checks that an enum value is a declared one: callers may cast any number.
#pragma once

#include <string>

#include "base/errors.h"
#include "marlin/format.h"
#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

inline Status CheckKnown(Format format) {
  if (static_cast<size_t>(format) < AllFormats().size()) return {};
  return Invalid("format: unknown number " + std::to_string(static_cast<int>(format)));
}

inline Status CheckKnown(ScaleType type) {
  if (type <= ScaleType::kE4M3) return {};
  return Invalid("scale type: unknown number " + std::to_string(static_cast<int>(type)));
}

inline Status CheckKnown(Sparsity sparsity) {
  if (sparsity <= Sparsity::k24) return {};
  return Invalid("sparsity: unknown number " + std::to_string(static_cast<int>(sparsity)));
}

}  // namespace marlin
