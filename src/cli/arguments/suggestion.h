// "Did you mean": the known word that a mistyped or half-typed one stands for.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace marlin::cli {

/// The known word nearest to `word`: one that begins with it, or one from which edits of at most a
/// third of its letters separate it, two swapped letters being one edit. Empty if there is none.
std::string_view NearestWord(std::string_view word, std::span<const std::string> known);

/// "; did you mean 'quantize'?", or nothing.
std::string DidYouMean(std::string_view word, std::span<const std::string> known);

}  // namespace marlin::cli
