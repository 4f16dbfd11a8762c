// The table of tensor names of GGUF files and of Hugging Face checkpoints.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "checkpoint/readers/gguf/gguf_names.h"

namespace marlin {

/// One tensor of a file: it is, or is a part of, a tensor elsewhere, or several tensors elsewhere
/// are parts of it.
struct GgufNameRow {
  enum class Use : uint8_t { kBoth, kRead, kWrite };

  std::string_view gguf;   ///< Without the layer.
  std::string_view name;   ///< The same; both without a suffix, unless `whole`.
  std::string_view types;  ///< One, or several; empty: all without a row of their own before it.
  GgufPlace::Rows rows = GgufPlace::Rows::kStraight;
  bool experts = false;
  bool as_row = false;
  bool whole = false;    ///< The names have their suffixes; otherwise these are equal.
  bool several = false;  ///< Other rows of either name apply, too.
  bool taps = false;
  bool value_columns = false;
  GgufPlace::Values values = GgufPlace::Values::kSame;
  Use use = Use::kBoth;
};

/// The rows of tensors of a layer, or of those outside of all layers.
std::span<const GgufNameRow> GgufNameRows(bool global);

}  // namespace marlin
