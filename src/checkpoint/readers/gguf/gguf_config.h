// The config.json that a GGUF file's metadata describe.
#pragma once

#include <span>
#include <string_view>

#include "base/function_ref.h"
#include "base/json.h"
#include "checkpoint/readers/gguf/gguf_file.h"
#include "checkpoint/readers/gguf/gguf_names.h"
#include "checkpoint/readers/gguf/gguf_rope.h"

namespace marlin {

/// Facts about a model that its tensors tell and its metadata do not.
struct GgufTensorFacts {
  /// The shape of a tensor by its name in the file; null if there is none.
  FunctionRef<const Shape*(std::string_view)> find;
  GgufRopeFactors rope_factors;
};

/// True when the metadata count experts.
bool HasGgufExperts(const GgufMetadata& metadata, std::string_view architecture);

/// The configuration of a known architecture; without the numbers that the metadata lack, so that
/// running the model names them.
Json GgufConfig(const GgufNaming& naming, const GgufMetadata& metadata,
                const GgufTensorFacts& tensors);

}  // namespace marlin
