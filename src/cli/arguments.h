// Declaring arguments without the parser's headers, which cost seconds in every file.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "cli/text_codec.h"
#include "marlin/status.h"

namespace CLI {
class App;
}

namespace marlin::cli {

/// The whole numbers that an option takes, both ends included.
struct WholeRange {
  int64_t least = 0;
  int64_t most = INT64_MAX;
};

/// The numbers that an option takes: up to `most`, and `least` itself unless it is left out.
struct RealRange {
  double least = 0;
  double most = std::numeric_limits<double>::max();
  bool without_least = false;
};

/// Threads that a command starts.
inline constexpr WholeRange kThreadRange{1, 4096};

/// Reads the whole text of an option as a number: decimal digits, with a point and an exponent
/// where it need not be whole. Errors: kInvalidArgument naming the option, the range and the text.
Result<int64_t> ParseOption(const char* option, const std::string& text, const WholeRange& range);
Result<double> ParseOption(const char* option, const std::string& text, const RealRange& range);

/// The arguments of one command. Pointers must outlive parsing; what is not given stays unchanged.
class ArgumentList {
 public:
  explicit ArgumentList(CLI::App& app) : app_(app) {}

  void Positional(const char* name, std::string* value, const char* help);
  /// Takes all the remaining positionals; may be empty.
  void Positionals(const char* name, std::vector<std::string>* values, const char* help);
  /// `names` is "-o,--output" or "--recipe"; `type` is what --help shows for the value.
  void Option(const char* names, std::string* value, const char* type, const char* help);
  void Option(const char* names, std::optional<std::string>* value, const char* type,
              const char* help);
  /// A number outside of its range is wrong use.
  void Option(const char* names, std::optional<int64_t>* value, const WholeRange& range,
              const char* type, const char* help);
  void Option(const char* names, std::optional<double>* value, const RealRange& range,
              const char* type, const char* help);
  /// May be given several times.
  void Option(const char* names, std::vector<std::string>* values, const char* type,
              const char* help);
  void RequiredOption(const char* names, std::string* value, const char* type, const char* help);
  void Flag(const char* names, bool* value, const char* help);
  /// Accepted, hidden from --help, and collected so that the command can answer it by name.
  void Later(const char* names, std::vector<std::string>* given);

 private:
  CLI::App& app_;
};

/// Parses the command line, runs the command and returns the exit code of the process. The factory
/// makes tokenizers for commands that take text; without one they take tokens.
int RunCommandLine(int argc, char** argv, const TextCodecFactory& text_codecs = {});

}  // namespace marlin::cli
