// Escapes untrusted text for messages and terminals.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace marlin {

/// Most bytes of untrusted text that a message quotes.
inline constexpr size_t kMaxPrintedBytes = 200;
/// Most bytes of a whole message.
inline constexpr size_t kMaxMessageBytes = 4096;

/// Whether line feeds and tabs are escaped or kept.
enum class Layout : bool { kOneLine, kKept };

/// The text as valid UTF-8 that cannot control a terminal: invalid UTF-8, control characters (C0,
/// DEL, C1), line and paragraph separators and bidirectional control characters become \xNN, one
/// per byte. Idempotent.
std::string EscapeUnprintable(std::string_view text, Layout layout = Layout::kOneLine);

/// EscapeUnprintable on one line. Longer texts are cut between characters, after at most
/// `max_bytes`, and end in "...".
std::string Printable(std::string_view text, size_t max_bytes = kMaxPrintedBytes);

}  // namespace marlin
