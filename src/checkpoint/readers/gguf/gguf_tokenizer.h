// The tokenizer of a GGUF file as the files that the tokenizers library reads.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/module_reader.h"
#include "checkpoint/readers/gguf/gguf_file.h"

namespace marlin {

inline constexpr int64_t kMaxGgufTokens = int64_t{1} << 22;

/// Values of tokenizer.ggml.token_type.
enum class GgufTokenType : int64_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

/// tokenizer.json and tokenizer_config.json; none if the metadata have no tokenizer. One that
/// tokenizer.json cannot express, or whose rules are not known here, has an obstacle in place of
/// content.
std::vector<ContainedFile> GgufTokenizerFiles(const GgufMetadata& metadata);

}  // namespace marlin
