// Declares arguments without the parser's headers, which add seconds to every compilation.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "text/hub_name.h"
#include "text/parse_option.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace marlin::cli {

/// An argument that is a model: a path, or a name of the Hub that becomes one before the command
/// runs.
struct ModelArgument {
  std::function<std::string*()> given;  ///< Null if the argument is absent.
  ModelPart part = ModelPart::kAll;
};

/// An argument as it was declared: what shell completions are made from.
struct DeclaredArgument {
  enum class Value : uint8_t { kNone, kNumber, kText };

  std::vector<std::string> names;  ///< "-o", "--output"; a positional's only name has no dash.
  std::string type;                ///< The value's name in --help: "FILE".
  std::string help;
  Value value = Value::kNone;
  std::vector<std::string> choices;  ///< Values to offer; others may be valid, too.
};

/// A command as it was declared.
struct DeclaredCommand {
  std::vector<std::string> names;  ///< The name first, then aliases.
  std::string summary;
  std::vector<DeclaredArgument> arguments;
  std::vector<DeclaredCommand> commands;  ///< The commands of a group, such as `bench`.
};

/// The arguments of one command. Pointers must outlive parsing; absent arguments stay unchanged.
class ArgumentList {
 public:
  explicit ArgumentList(CLI::App& app) : app_(app) {}

  /// Puts the following options under a heading of --help.
  void Group(const char* name) { group_ = name; }

  void Positional(const char* name, std::string* value, const char* help);
  /// May be absent.
  void Positional(const char* name, std::optional<std::string>* value, const char* help);
  /// `names` is "-o,--output" or "--recipe"; `type` is the value's name in --help.
  void Option(const char* names, std::string* value, const char* type, const char* help);
  void Option(const char* names, std::optional<std::string>* value, const char* type,
              const char* help);
  /// A number outside of its range is wrong usage.
  void Option(const char* names, std::optional<int64_t>* value, const WholeRange& range,
              const char* type, const char* help);
  void Option(const char* names, std::optional<double>* value, const RealRange& range,
              const char* type, const char* help);
  /// May be repeated.
  void Option(const char* names, std::vector<std::string>* values, const char* type,
              const char* help);
  /// May be given without a value, which is then empty.
  void OptionalValue(const char* names, std::optional<std::string>* value, const char* type,
                     const char* help);
  void RequiredOption(const char* names, std::string* value, const char* type, const char* help);
  void Flag(const char* names, bool* value, const char* help);
  /// Refuses an option together with any of a group, all declared before.
  void Exclude(const char* option, const char* group);

  /// Says that the value of an argument, declared before, is a model.
  void Model(std::string* value, ModelPart part = ModelPart::kAll);
  void Model(std::optional<std::string>* value, ModelPart part = ModelPart::kAll);
  void Model(std::function<std::string*()> given) { models_.push_back({std::move(given)}); }
  const std::vector<ModelArgument>& models() const { return models_; }

  /// Values of the argument declared last that shell completions offer. What it accepts remains
  /// the command's to check.
  void Choices(std::vector<std::string> choices) { declared_.back().choices = std::move(choices); }

  /// The same for the names of a table's rows.
  template <typename Rows, typename NameOf>
  void Choices(const Rows& rows, NameOf name_of) {
    std::vector<std::string> names;
    for (const auto& row : rows) names.emplace_back(name_of(row));
    Choices(std::move(names));
  }

  const std::vector<DeclaredArgument>& declared() const { return declared_; }

 private:
  CLI::Option* Placed(CLI::Option* option) const;
  /// Adds to the help of a positional that it may be a name of the Hub.
  void SayHub(const void* value);
  void Record(const char* names, DeclaredArgument::Value value, const char* type, const char* help);

  CLI::App& app_;
  const char* group_ = "Options";
  std::vector<ModelArgument> models_;
  std::vector<std::pair<const void*, CLI::Option*>> positionals_;  ///< The values and options.
  std::vector<DeclaredArgument> declared_;
};

/// All commands with the arguments that parsing would accept.
std::vector<DeclaredCommand> DeclareCommands();

}  // namespace marlin::cli
