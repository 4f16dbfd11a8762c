// Text that others wrote, made fit for a message or a terminal.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace marlin {

/// Most bytes of a foreign text that a message quotes.
inline constexpr size_t kMaxPrintedBytes = 200;
/// Most bytes of a whole message.
inline constexpr size_t kMaxMessageBytes = 4096;

/// Whether line feeds and tabs stay as they are.
enum class Layout : bool { kOneLine, kKept };

/// The text as valid UTF-8 that cannot steer a terminal: bytes that are not UTF-8, control
/// characters (C0, DEL, C1), line and paragraph separators and the marks that change the direction
/// of writing become \xNN, one for each byte. Idempotent.
std::string EscapeUnprintable(std::string_view text, Layout layout = Layout::kOneLine);

/// The same on one line, cut between characters with "..." after at most `max_bytes`.
std::string Printable(std::string_view text, size_t max_bytes = kMaxPrintedBytes);

}  // namespace marlin
