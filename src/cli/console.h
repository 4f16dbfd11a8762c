// Where a command's output goes: results to stdout, everything else to stderr.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "cli/text_codec.h"
#include "marlin/status.h"

namespace marlin::cli {

/// The process exit code of an error; the one place that maps them.
int ExitCode(Code code);
/// The name of an error in JSON: "malformed_file".
std::string ErrorName(Code code);

class Console {
 public:
  /// Ignores SIGPIPE, so that a closed reader ends in a failed write instead of a killed process,
  /// and opens closed standard streams as /dev/null.
  Console();

  bool json() const { return json_; }
  void set_json(bool json) { json_ = json; }
  /// True when stderr is a terminal: only then are progress bars and messages shown.
  bool interactive() const { return interactive_; }

  /// Makes tokenizers; empty in the command without one.
  const TextCodecFactory& text_codecs() const { return text_codecs_; }
  void set_text_codecs(TextCodecFactory factory) { text_codecs_ = std::move(factory); }

  /// Writes text for people, or a document, to stdout. A reader that has gone away is no error.
  /// Names from files, and what models write, reach a terminal here: all but printable characters,
  /// newlines and tabs becomes \xNN.
  Status Print(std::string_view text);
  /// True once the reader of stdout has gone away: there is no point in going on.
  bool reader_gone() const { return reader_gone_; }
  Status PrintJson(const nlohmann::ordered_json& document);
  /// PrintJson with rows in the array `key` of the document's own, which has to be empty there. One
  /// row is in memory at a time: a model may have a million.
  Status PrintJson(const nlohmann::ordered_json& document, std::string_view key, size_t rows,
                   const std::function<nlohmann::ordered_json(size_t)>& row);

  /// A line on stderr for people who watch; dropped when stderr is not a terminal.
  void Message(std::string_view text);

  /// An error as one line for stderr, and as a document for stdout.
  static std::string ErrorLine(const Status& status);
  static std::string ErrorDocument(const Status& status);

  /// Prints the error, if any, as one line on stderr and returns the exit code. With --json the
  /// error is a document on stdout, too, unless the command's own document is there already.
  int Finish(const Status& status);

 private:
  Status Write(std::string_view text);

  TextCodecFactory text_codecs_;
  bool reader_gone_ = false;
  bool printed_document_ = false;
  bool json_ = false;
  bool interactive_ = false;
};

}  // namespace marlin::cli
