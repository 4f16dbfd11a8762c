// The model card of an output directory: README.md, with the header that the Hugging Face Hub
// reads.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/files/io.h"
#include "marlin/checkpoint.h"
#include "marlin/weights.h"

namespace marlin {

inline constexpr std::string_view kModelCardName = "README.md";

/// A quantized module as the output holds it.
struct CardModule {
  WeightsSpec spec;
  std::string values;  ///< How its values relate to the source's: "exact".
};

/// The facts of a card.
struct ModelCard {
  std::string output;      ///< Path of the directory; the card has its last name.
  std::string target;      ///< Whose format the directory has: "metal-marlin", "gptq".
  std::string library;     ///< The Hub's name of the library that loads it.
  std::string method;      ///< How codes were chosen: "rtn"; "imported from gguf".
  std::string recipe;      ///< Empty: none.
  int64_t parameters = 0;  ///< Elements of all tensors.
  int64_t quantized_parameters = 0;
  int64_t bytes = 0;  ///< Size of the tensors written.
  std::vector<CardModule> modules;
  std::vector<SkippedTensor> skipped;  ///< Matrices that are not quantized.
  /// Modules with another method than the card's, and which.
  std::vector<SkippedTensor> other_methods;
  std::vector<std::string> metrics;  ///< Measurements, a sentence each.
};

/// The text of a card; equal facts give equal bytes. License, language and task are taken from the
/// source's own card, if its header has them. The last line holds a checksum of the rest.
/// Errors: kIo.
Result<std::string> ModelCardText(Io& io, const Checkpoint::Impl& source, const ModelCard& card);

/// Whether a card is what ModelCardText made, and nobody has changed it.
bool IsOwnCard(std::string_view text);

/// The card to write into a directory that will replace `output`: the directory's own if somebody
/// wrote or changed it, otherwise `made`. Empty: none. Errors: kIo.
Result<std::string> CardToWrite(Io& io, const std::string& output, std::string made);

}  // namespace marlin
