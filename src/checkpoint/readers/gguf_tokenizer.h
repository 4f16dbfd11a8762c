// The tokenizer of a GGUF file as the files that the tokenizers library reads.
#pragma once

#include <vector>

#include "checkpoint/module_reader.h"
#include "checkpoint/readers/gguf_file.h"

namespace marlin {

/// tokenizer.json and tokenizer_config.json; none if the metadata have no tokenizer. One that
/// tokenizer.json cannot express, or whose rules are not known here, has an obstacle in place of
/// content.
std::vector<ContainedFile> GgufTokenizerFiles(const GgufMetadata& metadata);

}  // namespace marlin
