#include "cli/arguments.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <memory>
#include <new>

#include "base/thread_pool.h"
#include "cli/command.h"
#include "cli/console.h"

namespace marlin::cli {
namespace {

constexpr const char* kVersion = MARLIN_VERSION;

template <typename T>
void AddOptional(CLI::App& app, const char* names, std::optional<T>* value, const char* type,
                 const char* help) {
  app.add_option_function<T>(
         names, [value](const T& given) { *value = given; }, help)
      ->type_name(type);
}

/// A parse error is wrong use; asking for help is not an error.
int AnswerParseError(const CLI::App& app, const CLI::ParseError& error, Console& console) {
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
  const auto chosen = app.get_subcommands();
  const std::string where = chosen.empty() ? "" : chosen.front()->get_name() + " ";
  return console.Finish(
      Status(Code::kInvalidArgument,
             std::string(error.what()) + "; see metal-marlin " + where + "--help"));
}

int ParseAndRun(int argc, char** argv, Console& console) {
  CLI::App app("Quantizes large language models to 2-8 bits and multiplies with them.",
               "metal-marlin");
  app.set_version_flag("--version", std::string("metal-marlin ") + kVersion);
  app.require_subcommand(1);
  std::vector<std::unique_ptr<Command>> commands;
  std::vector<CLI::App*> parsers;
  bool json = false;
  for (const CommandEntry& entry : AllCommands()) {
    std::string name = entry.name;
    std::replace(name.begin(), name.end(), '_', '-');
    CLI::App* parser = app.add_subcommand(name, entry.summary);
    parser->footer(std::string("Example:\n  ") + entry.example);
    commands.push_back(entry.make());
    ArgumentList arguments(*parser);
    commands.back()->Declare(arguments);
    arguments.Flag("--json", &json, "Print one JSON document on stdout and nothing else");
    parsers.push_back(parser);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return AnswerParseError(app, error, console);
  }
  console.set_json(json);
  for (size_t i = 0; i < parsers.size(); ++i) {
    if (parsers[i]->parsed()) return console.Finish(commands[i]->Run(console));
  }
  return console.Finish(Status(Code::kInternal, "no command was chosen"));
}

}  // namespace

void ArgumentList::Positional(const char* name, std::string* value, const char* help) {
  app_.add_option(name, *value, help)->required()->type_name("");
}

void ArgumentList::Positionals(const char* name, std::vector<std::string>* values,
                               const char* help) {
  app_.add_option(name, *values, help)->type_name("");
}

void ArgumentList::Option(const char* names, std::string* value, const char* type,
                          const char* help) {
  app_.add_option(names, *value, help)->type_name(type)->capture_default_str();
}

void ArgumentList::Option(const char* names, std::optional<std::string>* value, const char* type,
                          const char* help) {
  AddOptional(app_, names, value, type, help);
}

void ArgumentList::Option(const char* names, std::optional<int64_t>* value, const char* type,
                          const char* help) {
  AddOptional(app_, names, value, type, help);
}

void ArgumentList::Option(const char* names, std::optional<double>* value, const char* type,
                          const char* help) {
  AddOptional(app_, names, value, type, help);
}

void ArgumentList::Option(const char* names, std::vector<std::string>* values, const char* type,
                          const char* help) {
  // One value per occurrence: "--override A B" must not swallow the positional B.
  app_.add_option(names, *values, help)->type_name(type)->expected(1)->take_all();
}

void ArgumentList::RequiredOption(const char* names, std::string* value, const char* type,
                                  const char* help) {
  app_.add_option(names, *value, help)->required()->type_name(type);
}

void ArgumentList::Flag(const char* names, bool* value, const char* help) {
  app_.add_flag(names, *value, help);
}

void ArgumentList::Later(const char* names, std::vector<std::string>* given) {
  app_.add_option_function<std::string>(
          names, [names, given](const std::string&) { given->push_back(names); }, "")
      ->group("");
}

int RunCommandLine(int argc, char** argv, const TextCodecFactory& text_codecs) {
  Console console;
  console.set_text_codecs(text_codecs);
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

}  // namespace marlin::cli
