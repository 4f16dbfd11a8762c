#include "cli/arguments.h"

#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <charconv>
#include <memory>
#include <new>
#include <span>
#include <string_view>

#include "base/checked.h"
#include "base/parse_number.h"
#include "base/printable.h"
#include "base/thread_pool.h"
#include "cli/command.h"
#include "cli/console.h"
#include "cli/help_formatter.h"
#include "cli/suggestion.h"
#include "marlin/version.h"

namespace marlin::cli {
namespace {

/// `kind` is "a whole number" or "a number", for text that is not a number at all.
Status WrongNumber(const char* option, const char* kind, const std::string& range,
                   const std::string& text, bool is_number) {
  if (is_number) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: expected {}, got {}", option, range, text));
  }
  constexpr size_t kShownCharacters = 40;
  const bool whole = text.size() <= kShownCharacters;
  return Status(Code::kInvalidArgument,
                fmt::format("{}: expected {}, {}, got '{}'{}", option, kind, range,
                            text.substr(0, kShownCharacters), whole ? "" : " and more"));
}

/// Numbers are parsed here rather than by CLI11, which reads an empty value as 0 and clamps values
/// that are too large.
template <typename T, typename Range>
CLI::Option* AddNumber(CLI::App& app, const char* names, std::optional<T>* value,
                       const Range& range, const char* type, const char* help) {
  return app
      .add_option_function<std::string>(
          names,
          [=](const std::string& text) {
            const Result<T> number = ParseOption(names, text, range);
            if (!number.ok()) throw CLI::ValidationError(number.status().message());
            *value = *number;
          },
          help)
      ->type_name(type);
}

std::vector<std::string> CommandNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
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

/// The first word that is no command, or no option of the command, and what it may stand for. Empty
/// if there is none.
std::string UnknownWord(const CLI::App& app, std::span<char* const> words) {
  const std::vector<std::string> left = app.remaining(true);
  const auto chosen = app.get_subcommands();
  for (const std::string_view word : words) {
    if (std::find(left.begin(), left.end(), word) == left.end()) continue;
    const std::string_view name = word.substr(0, word.find('='));
    if (word.starts_with('-')) {
      const CLI::App& command = chosen.empty() ? app : *chosen.front();
      return fmt::format("unknown option '{}'{}", Printable(std::string(name)),
                         DidYouMean(name, OptionNames(command)));
    }
    if (chosen.empty()) {
      return fmt::format("unknown command '{}'{}", Printable(std::string(word)),
                         DidYouMean(word, CommandNames(app)));
    }
  }
  return {};
}

/// Reports a parse error as wrong usage; a request for help is not an error, nor is a call without
/// arguments.
int AnswerParseError(const CLI::App& app, std::span<char* const> words,
                     const CLI::ParseError& error, Console& console) {
  if (words.empty()) return console.Finish(console.Print(app.help()));
  if (error.get_exit_code() == 0) {
    std::string text;
    if (error.get_name() == "CallForVersion") {
      text = std::string(error.what()) + "\n";
    } else {
      const auto chosen = app.get_subcommands();
      text = chosen.empty() ? app.help() : chosen.front()->help("metal-marlin");
    }
    return console.Finish(console.Print(text));
  }
  // Another program knows the options, and has no help to see.
  if (console.collected() != nullptr) {
    return console.Finish(Status(Code::kInvalidArgument, error.what()));
  }
  const auto chosen = app.get_subcommands();
  const std::string where = chosen.empty() ? "" : chosen.front()->get_name() + " ";
  std::string message = UnknownWord(app, words);
  if (message.empty()) message = error.what();
  message += message.ends_with('?') ? " See" : "; see";
  return console.Finish(
      Status(Code::kInvalidArgument, fmt::format("{} metal-marlin {}--help", message, where)));
}

int ParseAndRun(int argc, char** argv, Console& console) {
  CLI::App app("Shrinks LLM checkpoints to 2-8 bits, measures what that costs, and runs them.",
               "metal-marlin");
  app.set_version_flag("--version", std::string("metal-marlin ") + Version());
  app.require_subcommand(1);
  app.formatter(MakeHelpFormatter());
  std::vector<std::unique_ptr<Command>> commands;
  std::vector<CLI::App*> parsers;
  bool json = false;
  bool quiet = false;
  bool verbose = false;
  for (const CommandEntry& entry : AllCommands()) {
    std::string name = entry.name;
    std::replace(name.begin(), name.end(), '_', '-');
    CLI::App* parser = app.add_subcommand(name, entry.summary);
    parser->group(entry.group);
    parser->get_help_ptr()->group("General")->description("Print this help");
    parser->footer(std::string("Example:\n  ") + entry.example);
    commands.push_back(entry.make());
    ArgumentList arguments(*parser);
    commands.back()->Declare(arguments);
    arguments.Group("General");
    arguments.Flag("--json", &json, "Print one JSON document on stdout and nothing else");
    arguments.Flag("-q,--quiet", &quiet, "Print no progress and no messages");
    arguments.Flag("-v,--verbose", &verbose,
                   "Print messages and progress to a file or pipe as to a terminal");
    parsers.push_back(parser);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const std::span<char* const> words(argv, static_cast<size_t>(argc));
    return AnswerParseError(app, words.subspan(1), error, console);
  }
  console.set_json(json);
  console.set_quiet(quiet);
  console.set_verbose(verbose);
  for (size_t i = 0; i < parsers.size(); ++i) {
    if (parsers[i]->parsed()) return console.Finish(commands[i]->Run(console));
  }
  return console.Finish(Status(Code::kInternal, "no command was given"));
}

/// Parses and runs; exceptions become the status of the command.
int RunCaught(int argc, char** argv, Console& console) {
  try {
    return ParseAndRun(argc, argv, console);
  } catch (const ThreadStartError& error) {
    return console.Finish(Status(Code::kOutOfMemory, error.what()));
  } catch (const std::bad_alloc&) {
    return console.Finish(Status(Code::kOutOfMemory, "out of memory"));
  } catch (const std::exception& error) {
    return console.Finish(Status(Code::kInternal, error.what()));
  }
}

}  // namespace

Result<int64_t> ParseOption(const char* option, const std::string& text, const WholeRange& range) {
  int64_t number = 0;
  const bool is_number = ParseNumber(text, &number);
  if (is_number && number >= range.least && number <= range.most) return number;
  const std::string expected = range.most == INT64_MAX
                                   ? fmt::format("{} or more", range.least)
                                   : fmt::format("{}..{}", range.least, range.most);
  return WrongNumber(option, "a whole number", expected, text, is_number);
}

Result<double> ParseOption(const char* option, const std::string& text, const RealRange& range) {
  double number = 0;
  // Some standard libraries also parse hexadecimal digits and names such as nan.
  const bool is_number =
      text.find_first_not_of("0123456789+-.eE") == std::string::npos && ParseNumber(text, &number);
  const bool enough = range.without_least ? number > range.least : number >= range.least;
  if (is_number && enough && number <= range.most) return number;
  const bool open = range.most == std::numeric_limits<double>::max();
  const std::string expected =
      range.without_least
          ? fmt::format("more than {}{}", range.least,
                        open ? "" : fmt::format(" and at most {}", range.most))
          : fmt::format("{}{}", range.least, open ? " or more" : fmt::format("..{}", range.most));
  return WrongNumber(option, "a number", expected, text, is_number);
}

Result<int64_t> ParseByteSize(const char* option, const std::string& text) {
  struct Unit {
    std::string_view name;
    int64_t bytes;
  };
  constexpr Unit kUnits[] = {
      {"", 1},
      {"B", 1},
      {"kB", 1000},
      {"KB", 1000},
      {"MB", 1000 * 1000},
      {"GB", 1000 * 1000 * 1000},
      {"TB", int64_t{1000} * 1000 * 1000 * 1000},
      {"KiB", 1 << 10},
      {"MiB", 1 << 20},
      {"GiB", 1 << 30},
      {"TiB", int64_t{1} << 40},
  };
  int64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  const std::string_view unit_name(stop, static_cast<size_t>(end - stop));
  for (const Unit& unit : kUnits) {
    if (error != std::errc() || unit.name != unit_name) continue;
    const auto bytes = (Checked(number) * Checked(unit.bytes)).Take();
    if (bytes && *bytes > 0) return *bytes;
  }
  return Status(Code::kInvalidArgument,
                fmt::format("{}: expected a size such as 5GB, got '{}'", option, text));
}

CLI::Option* ArgumentList::Placed(CLI::Option* option) const { return option->group(group_); }

void ArgumentList::Positional(const char* name, std::string* value, const char* help) {
  app_.add_option(name, *value, help)->required()->type_name("");
}

void ArgumentList::Positional(const char* name, std::optional<std::string>* value,
                              const char* help) {
  app_.add_option_function<std::string>(
          name, [value](const std::string& given) { *value = given; }, help)
      ->type_name("");
}

void ArgumentList::Option(const char* names, std::string* value, const char* type,
                          const char* help) {
  Placed(app_.add_option(names, *value, help))->type_name(type)->capture_default_str();
}

void ArgumentList::Option(const char* names, std::optional<std::string>* value, const char* type,
                          const char* help) {
  Placed(app_.add_option_function<std::string>(
             names, [value](const std::string& given) { *value = given; }, help))
      ->type_name(type);
}

void ArgumentList::Option(const char* names, std::optional<int64_t>* value, const WholeRange& range,
                          const char* type, const char* help) {
  Placed(AddNumber(app_, names, value, range, type, help));
}

void ArgumentList::Option(const char* names, std::optional<double>* value, const RealRange& range,
                          const char* type, const char* help) {
  Placed(AddNumber(app_, names, value, range, type, help));
}

void ArgumentList::Option(const char* names, std::vector<std::string>* values, const char* type,
                          const char* help) {
  // One value per occurrence: "--override A B" must not swallow the positional B. CLI11 would also
  // read "[A,B]" as two values, in recursion, and "--stop [END]" as "END".
  Placed(app_.add_option(names, *values, help))
      ->type_name(type)
      ->expected(1)
      ->take_all()
      ->allow_extra_args(false);
}

void ArgumentList::RequiredOption(const char* names, std::string* value, const char* type,
                                  const char* help) {
  Placed(app_.add_option(names, *value, help))->required()->type_name(type);
}

void ArgumentList::Flag(const char* names, bool* value, const char* help) {
  Placed(app_.add_flag(names, *value, help));
}

int RunCommandLine(int argc, char** argv, const TextCodecFactory& text_codecs) {
  Console console;
  console.set_text_codecs(text_codecs);
  // If the arguments cannot be parsed, the error still takes the form that --json requests.
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i) {
    if (std::string_view(argv[i]) == "--json") console.set_json(true);
  }
  return RunCaught(argc, argv, console);
}

Result<std::string> RunForDocument(const std::vector<std::string>& words,
                                   const std::function<void(int64_t, int64_t)>& progress) {
  std::vector<std::string> copies = {"metal-marlin"};
  copies.insert(copies.end(), words.begin(), words.end());
  std::vector<char*> argv;
  for (std::string& copy : copies) argv.push_back(copy.data());
  argv.push_back(nullptr);
  CollectedOutput collected;
  collected.progress = progress;
  Console console(&collected);
  RunCaught(static_cast<int>(copies.size()), argv.data(), console);
  if (collected.document.empty() && !collected.status.ok()) return collected.status;
  return std::move(collected.document);
}

}  // namespace marlin::cli
