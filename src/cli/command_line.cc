#include "cli/command_line.h"

#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/thread_pool.h"
#include "cli/arguments/arguments.h"
#include "cli/arguments/help_formatter.h"
#include "cli/arguments/suggestion.h"
#include "cli/command.h"
#include "cli/console.h"
#include "marlin/version.h"

namespace marlin::cli {
namespace {

std::vector<std::string> CommandNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) {
    names.push_back(command->get_name());
    for (const std::string& alias : command->get_aliases()) names.push_back(alias);
  }
  return names;
}

std::vector<std::string> OptionNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  return names;
}

/// The command that the words chose: of `bench gemm` gemm, of no command the program itself.
const CLI::App& ChosenCommand(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? app : ChosenCommand(*chosen.front());
}

/// "bench gemm"; empty for the program itself.
std::string PathOf(const CLI::App& command) {
  const CLI::App* const parent = command.get_parent();
  if (parent == nullptr) return {};
  const std::string above = PathOf(*parent);
  return above.empty() ? command.get_name() : above + " " + command.get_name();
}

bool HasOption(const CLI::App& command, std::string_view name) {
  const std::vector<std::string> names = OptionNames(command);
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// The other commands of the same group that have an option: "bench moe and bench model".
std::string OwnersOf(const CLI::App& command, std::string_view option) {
  const CLI::App* const group = command.get_parent();
  if (group == nullptr || group->get_parent() == nullptr) return {};
  std::string owners;
  for (const CLI::App* other : group->get_subcommands({})) {
    if (HasOption(*other, option)) owners += (owners.empty() ? "" : " and ") + PathOf(*other);
  }
  return owners;
}

/// The error of an option that the parser did not take.
std::string UnknownOption(const CLI::App& command, std::string_view name) {
  const std::string path = PathOf(command);
  if (HasOption(command, name)) {
    return fmt::format("{0}: options come after the command: metal-marlin {0} {1}", path, name);
  }
  const std::string owners = OwnersOf(command, name);
  if (!owners.empty()) return fmt::format("{}: has no {}, an option of {}", path, name, owners);
  return fmt::format("unknown option '{}'{}", Printable(std::string(name)),
                     DidYouMean(name, OptionNames(command)));
}

/// The error of a word beyond the arguments that a command takes, with the option that it most
/// likely belongs to: the first of these that the command has and that was not given.
std::string SurplusWord(const CLI::App& command, std::string_view word) {
  constexpr std::string_view kLikely[] = {"--prompt", "--against", "--output"};
  const std::string shown = Printable(std::string(word));
  // In the group `bench` --against takes the name of a library.
  const bool grouped = command.get_parent()->get_parent() != nullptr;
  for (const std::string_view name : kLikely) {
    if (grouped || !HasOption(command, name) || command.get_option(std::string(name))->count() > 0)
      continue;
    return fmt::format("unexpected argument '{0}'; did you mean {1} '{0}'?", shown, name);
  }
  return fmt::format("unexpected argument '{}'", shown);
}

/// The first word that is no command, or no option of the command, and what it may stand for. Empty
/// if there is none.
std::string UnknownWord(const CLI::App& app, std::span<char* const> words) {
  const std::vector<std::string> left = app.remaining(true);
  const CLI::App& command = ChosenCommand(app);
  const std::vector<std::string> known = CommandNames(command);
  std::string_view surplus;
  for (const std::string_view word : words) {
    if (std::find(left.begin(), left.end(), word) == left.end()) continue;
    if (word.starts_with('-')) return UnknownOption(command, word.substr(0, word.find('=')));
    if (known.empty()) {
      // An unknown option leaves its value, too, and perhaps a word that was taken for another's.
      if (surplus.empty()) surplus = word;
      continue;
    }
    const std::string path = PathOf(command);
    if (path.empty() && word == "run") return "unknown command 'run'; did you mean 'generate'?";
    return fmt::format("unknown command '{}{}{}'{}", path, path.empty() ? "" : " ",
                       Printable(std::string(word)), DidYouMean(word, known));
  }
  return surplus.empty() ? std::string() : SurplusWord(command, surplus);
}

/// "--output: DST is missing" for the parser's "--output: 1 required DST missing"; otherwise empty.
std::string MissingValue(std::string_view message) {
  constexpr std::string_view kRequired = ": 1 required ";
  constexpr std::string_view kMissing = " missing";
  const size_t at = message.find(kRequired);
  if (at == std::string_view::npos || !message.ends_with(kMissing)) return {};
  std::string_view type = message.substr(at + kRequired.size());
  type.remove_suffix(kMissing.size());
  return fmt::format("{}: {} is missing", message.substr(0, at), type);
}

/// Reports a parse error as wrong usage; a request for help is not an error, nor is a call without
/// arguments or with the name of a group alone.
int AnswerParseError(const CLI::App& app, std::span<char* const> words,
                     const CLI::ParseError& error, Console& console) {
  const CLI::App& command = ChosenCommand(app);
  const std::string path = PathOf(command);
  const bool group_alone = words.size() == 1 && !CommandNames(command).empty() && path == words[0];
  if (words.empty() || group_alone) return console.Finish(console.Print(app.help()));
  if (error.get_exit_code() == 0) {
    const bool version = error.get_name() == "CallForVersion";
    return console.Finish(console.Print(version ? std::string(error.what()) + "\n" : app.help()));
  }
  // Another program knows the options, and has no help to see.
  if (console.collected() != nullptr) {
    return console.Finish(Invalid(error.what()));
  }
  std::string message = UnknownWord(app, words);
  if (message.empty()) message = MissingValue(error.what());
  if (message.empty()) message = error.what();
  message += message.ends_with('?') ? " See" : "; see";
  return console.Finish(
      Invalid(fmt::format("{} metal-marlin {}{}--help", message, path, path.empty() ? "" : " ")));
}

/// Checks the arguments, then replaces names of the Hub by paths, and runs.
Status RunCommand(Command& command, const std::vector<ModelArgument>& models, bool offline,
                  const ModelResolver& resolver, Console& console) {
  MARLIN_RETURN_IF_ERROR(command.Check(console));
  for (const ModelArgument& model : models) {
    std::string* const name = model.given();
    if (name == nullptr) continue;
    MARLIN_ASSIGN_OR_RETURN(
        *name,
        ResolveModel({*name, model.part, offline, console.quiet(), console.verbose()}, resolver));
  }
  return command.Run(console);
}

/// The options of every command.
struct GeneralFlags {
  bool offline = false;
  bool json = false;
  bool quiet = false;
  bool verbose = false;

  void Declare(ArgumentList& arguments) {
    arguments.Group(kGeneralGroup);
    if (!arguments.models().empty()) {
      arguments.Flag("--offline", &offline,
                     "Download nothing: read models of the Hugging Face Hub, "
                     "org/name[@revision][:file], from its cache");
    }
    arguments.Flag("--json", &json, "Print one JSON document on stdout and nothing else");
    arguments.Flag("-q,--quiet", &quiet, "Print no progress and no messages");
    arguments.Flag("-v,--verbose", &verbose,
                   "Print messages and progress to a file or pipe as to a terminal");
  }
};

/// The names that users write: the command's, then its aliases.
std::vector<std::string> NamesOf(const CommandEntry& entry) {
  std::vector<std::string> names = {entry.name};
  for (const CommandAlias& alias : AllCommandAliases()) {
    if (std::string_view(alias.command) == entry.name) names.emplace_back(alias.name);
  }
  for (std::string& name : names) std::replace(name.begin(), name.end(), '_', '-');
  return names;
}

/// The parsers of all commands, groups included, and the flags that every command has.
class CommandParsers {
 public:
  explicit CommandParsers(CLI::App& app) { Add(app, AllCommands()); }

  /// Passes the flags on and runs the command that was parsed.
  Status Run(const ModelResolver& resolver, Console& console) {
    console.set_json(flags_.json);
    console.set_quiet(flags_.quiet);
    console.set_verbose(flags_.verbose);
    for (const Parsed& each : commands_) {
      if (each.parser->parsed()) {
        return RunCommand(*each.command, each.models, flags_.offline, resolver, console);
      }
    }
    return Status(Code::kInternal, "no command was given");
  }

 private:
  struct Parsed {
    CLI::App* parser;
    std::unique_ptr<Command> command;
    std::vector<ModelArgument> models;
  };

  void Add(CLI::App& parent, std::span<const CommandEntry> entries) {
    for (const CommandEntry& entry : entries) {
      const std::vector<std::string> names = NamesOf(entry);
      CLI::App* parser = parent.add_subcommand(names.front(), entry.summary);
      for (const std::string& alias : std::span(names).subspan(1)) parser->alias(alias);
      parser->group(entry.group);
      parser->get_help_ptr()->group(kGeneralGroup);
      parser->footer(std::string("Example:\n  ") + entry.example);
      ArgumentList arguments(*parser);
      if (entry.commands != nullptr) {
        parser->require_subcommand(1);
        Add(*parser, entry.commands());
      } else {
        std::unique_ptr<Command> command = entry.make();
        command->Declare(arguments);
        commands_.push_back({parser, std::move(command), arguments.models()});
      }
      flags_.Declare(arguments);
    }
  }

  std::vector<Parsed> commands_;
  GeneralFlags flags_;
};

/// The commands of a table, with the arguments that parsing would accept.
std::vector<DeclaredCommand> DeclareAll(std::span<const CommandEntry> entries) {
  std::vector<DeclaredCommand> declared;
  for (const CommandEntry& entry : entries) {
    CLI::App parser;
    ArgumentList arguments(parser);
    DeclaredCommand command{NamesOf(entry), entry.summary, {}, {}};
    std::unique_ptr<Command> made;
    if (entry.commands != nullptr) {
      command.commands = DeclareAll(entry.commands());
    } else {
      made = entry.make();
      made->Declare(arguments);
    }
    GeneralFlags flags;
    flags.Declare(arguments);
    command.arguments = arguments.declared();
    command.arguments.push_back(
        {{"-h", "--help"}, "", "Print this help", DeclaredArgument::Value::kNone, {}});
    declared.push_back(std::move(command));
  }
  return declared;
}

std::string VersionText(const Console& console) {
  return fmt::format("metal-marlin {} ({})", Version(), ProgramName(console));
}

/// The words of a command line with "--name=" as two, "--name" and "": CLI11 takes the next word
/// for a value that is empty.
std::vector<std::string> WithEmptyValues(std::span<char* const> words) {
  std::vector<std::string> split;
  bool options = true;
  for (const std::string_view word : words) {
    options = options && word != "--";
    const bool is_empty =
        options && word.size() > 3 && word.starts_with("--") && word.find('=') == word.size() - 1;
    split.emplace_back(is_empty ? word.substr(0, word.size() - 1) : word);
    if (is_empty) split.emplace_back();
  }
  return split;
}

/// `help`, `help COMMAND` and `version` as the options that people mean.
std::vector<std::string> AsOptions(std::vector<std::string> words) {
  if (words.size() == 2 && words[1] == "version") words[1] = "--version";
  if (words.size() > 1 && words[1] == "help") {
    words.erase(words.begin() + 1);
    words.emplace_back("--help");
  }
  return words;
}

int ParseAndRun(int argc, char** argv, const ModelResolver& resolver, Console& console) {
  CLI::App app("Shrinks LLM checkpoints to 2-8 bits, measures what that costs, and runs them.",
               "metal-marlin");
  app.set_help_flag("-h,--help", "Print this help");
  app.set_version_flag("--version", VersionText(console),
                       "Print the version and which program this is");
  app.footer("metal-marlin COMMAND --help describes a command, with an example.");
  app.require_subcommand(1);
  app.formatter(MakeHelpFormatter());
  CommandParsers parsers(app);
  const std::span<char* const> words(argv, static_cast<size_t>(argc));
  const std::vector<std::string> whole = AsOptions(WithEmptyValues(words));
  std::vector<const char*> pointers;
  pointers.reserve(whole.size());
  for (const std::string& word : whole) pointers.push_back(word.c_str());
  try {
    app.parse(static_cast<int>(pointers.size()), pointers.data());
  } catch (const CLI::ParseError& error) {
    return AnswerParseError(app, words.subspan(1), error, console);
  }
  return console.Finish(parsers.Run(resolver, console));
}

/// Parses and runs; exceptions become the status of the command.
int RunCaught(int argc, char** argv, const ModelResolver& resolver, Console& console) {
  try {
    return ParseAndRun(argc, argv, resolver, console);
  } catch (const ThreadStartError& error) {
    return console.Finish(Status(Code::kOutOfMemory, error.what()));
  } catch (const std::bad_alloc&) {
    return console.Finish(Status(Code::kOutOfMemory, "out of memory"));
  } catch (const std::exception& error) {
    return console.Finish(Status(Code::kInternal, error.what()));
  }
}

}  // namespace

std::vector<DeclaredCommand> DeclareCommands() { return DeclareAll(AllCommands()); }

int RunCommandLine(int argc, char** argv, const TextCodecFactory& text_codecs,
                   const ModelResolver& model_resolver, const Examination& examination) {
  Console console;
  console.set_text_codecs(text_codecs);
  console.set_examination(examination);
  // If the arguments cannot be parsed, the error still takes the form that --json requests.
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i) {
    if (std::string_view(argv[i]) == "--json") console.set_json(true);
  }
  return RunCaught(argc, argv, model_resolver, console);
}

Result<std::string> RunForDocument(const std::vector<std::string>& words,
                                   const ModelResolver& model_resolver,
                                   const std::function<void(int64_t, int64_t)>& progress) {
  std::vector<std::string> copies = {"metal-marlin"};
  copies.insert(copies.end(), words.begin(), words.end());
  std::vector<char*> argv;
  argv.reserve(copies.size() + 1);
  for (std::string& copy : copies) argv.push_back(copy.data());
  argv.push_back(nullptr);
  CollectedOutput collected;
  collected.progress = progress;
  Console console(&collected);
  RunCaught(static_cast<int>(copies.size()), argv.data(), model_resolver, console);
  if (collected.document.empty() && !collected.status.ok()) return collected.status;
  return std::move(collected.document);
}

}  // namespace marlin::cli
