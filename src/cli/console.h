// The output of a command: results to stdout, everything else to stderr.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "marlin/status.h"
#include "text/examination.h"
#include "text/text_codec.h"

namespace marlin::cli {

/// The exit code of an error; the only place that maps them.
int ExitCode(Code code);
/// The name of an error in JSON: "malformed_file".
std::string ErrorName(Code code);

/// The output of a command that runs inside another program, which does not print it.
struct CollectedOutput {
  std::string document;                                            ///< Its standard output.
  Status status;                                                   ///< Its result.
  std::function<void(int64_t done, int64_t total)> progress = {};  ///< Hears of long work.
};

/// The command that has tokenizers and downloads, and where to get it.
inline constexpr std::string_view kPythonCommand =
    ".venv/bin/metal-marlin after ./dev build, or pip install .";

class Console {
 public:
  /// For a command inside another program: prints nothing, and leaves signals and streams alone.
  explicit Console(CollectedOutput* collected) : collected_(collected) {}
  /// Ignores SIGPIPE, so that a closed reader causes a write error instead of killing the process,
  /// and opens closed standard streams as /dev/null.
  Console();

  /// Null in a program of its own.
  CollectedOutput* collected() const { return collected_; }
  bool json() const { return json_; }
  void set_json(bool json) { json_ = json; }
  /// Whether stderr is a terminal.
  bool interactive() const { return interactive_; }
  /// Prints results and errors alone.
  bool quiet() const { return quiet_; }
  void set_quiet(bool quiet) { quiet_ = quiet; }
  /// Prints messages, and more progress, where stderr is no terminal, too.
  bool verbose() const { return verbose_; }
  void set_verbose(bool verbose) { verbose_ = verbose; }

  /// The tokenizer factory; empty in the command without one.
  const TextCodecFactory& text_codecs() const { return text_codecs_; }
  void set_text_codecs(TextCodecFactory factory) { text_codecs_ = std::move(factory); }

  /// Examines the program that embeds the command; empty in the command itself.
  const Examination& examination() const { return examination_; }
  void set_examination(Examination examination) { examination_ = std::move(examination); }

  /// Writes text or a document to stdout. A closed reader is not an error. Escapes text from files
  /// and models for terminals: anything but printable characters, newlines and tabs becomes \xNN.
  Status Print(std::string_view text);
  /// True once the reader of stdout has closed it: further output is pointless.
  bool reader_gone() const { return reader_gone_; }
  Status PrintJson(const nlohmann::ordered_json& document);
  /// One of several documents, each on a line of its own.
  Status PrintJsonLine(const nlohmann::ordered_json& document);
  /// PrintJson with `rows` streamed into the array `key`, which must be empty in the document. Only
  /// one row is in memory at a time: a model may have a million.
  Status PrintJson(const nlohmann::ordered_json& document, std::string_view key, size_t rows,
                   const std::function<nlohmann::ordered_json(size_t)>& row);

  /// Prints a line on stderr, if that is a terminal or with --verbose, and not with --quiet.
  void Message(std::string_view text);

  /// An error as one line for stderr, and as a JSON document for stdout.
  static std::string ErrorLine(const Status& status);
  static std::string ErrorDocument(const Status& status);

  /// Prints the error, if any, as one line on stderr and returns the exit code. With --json the
  /// error is also a document on stdout, unless the command has printed its own document.
  int Finish(const Status& status);

 private:
  Status Write(std::string_view text);

  CollectedOutput* collected_ = nullptr;
  TextCodecFactory text_codecs_;
  Examination examination_;
  bool reader_gone_ = false;
  bool printed_document_ = false;
  bool json_ = false;
  bool interactive_ = false;
  bool quiet_ = false;
  bool verbose_ = false;
};

/// "C++ program, without tokenizers": two programs have this command's name.
std::string_view ProgramName(const Console& console);

}  // namespace marlin::cli
