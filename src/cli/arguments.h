// Declaring arguments without the parser's headers, which cost seconds in every file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/text_codec.h"

namespace CLI {
class App;
}

namespace marlin::cli {

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
  void Option(const char* names, std::optional<int64_t>* value, const char* type, const char* help);
  void Option(const char* names, std::optional<double>* value, const char* type, const char* help);
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
