#include "cli/arguments/completion_script.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>

#include "base/errors.h"
#include "base/printable.h"

namespace marlin::cli {
namespace {

using Value = DeclaredArgument::Value;

/// The options that the program has without a command.
constexpr const char* kProgramOptions = "--help --version";

bool IsPositional(const DeclaredArgument& argument) {
  return !argument.names.front().starts_with('-');
}

/// Whether a value may be a path: a positional without a list of its values, or an option whose
/// value's name in --help says so.
bool TakesPath(const DeclaredArgument& argument) {
  if (argument.value != Value::kText) return false;
  if (IsPositional(argument)) return argument.choices.empty();
  constexpr std::string_view kPaths[] = {"FILE", "DIR", "DST", "FOLDER", "SRC", "MODEL", "RECIPE"};
  return std::any_of(std::begin(kPaths), std::end(kPaths), [&](std::string_view path) {
    return argument.type.find(path) != std::string::npos;
  });
}

std::string Replaced(std::string_view text, std::string_view letters, std::string_view before) {
  std::string replaced;
  for (const char c : text) {
    if (letters.find(c) != std::string_view::npos) replaced += before;
    replaced += c;
  }
  return replaced;
}

/// Text in single quotes of a POSIX shell.
std::string Quoted(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string OptionWords(const DeclaredCommand& command) {
  std::vector<std::string> words;
  for (const DeclaredArgument& argument : command.arguments) {
    if (!IsPositional(argument)) words.push_back(argument.names.back());
  }
  return fmt::format("{}", fmt::join(words, " "));
}

/// "'export:--to'|'convert:--to'" for every path of a command and name of an option.
std::string BashPattern(std::span<const std::string> paths, const DeclaredArgument& argument) {
  std::vector<std::string> words;
  for (const std::string& path : paths) {
    for (const std::string& option : argument.names) {
      words.push_back(Quoted(fmt::format("{}:{}", path, option)));
    }
  }
  return fmt::format("{}", fmt::join(words, "|"));
}

/// The words that choose a command: its group's names, then its own.
std::vector<std::string> PathsOf(const std::string& group, const DeclaredCommand& command) {
  std::vector<std::string> paths;
  for (const std::string& name : command.names) paths.push_back(group + name);
  return paths;
}

std::string FirstNames(std::span<const DeclaredCommand> commands) {
  std::vector<std::string> names;
  for (const DeclaredCommand& command : commands) names.push_back(command.names.front());
  return fmt::format("{}", fmt::join(names, " "));
}

/// The cases of commands: their options, what they take, and their positionals.
struct BashCases {
  std::string groups;   ///< Chosen by the first word, where the second is a command, too.
  std::string options;  ///< Chosen by the command.
  std::string values;   ///< Chosen by the command and the word before the current one.
};

void AddBashGroup(const DeclaredCommand& group, BashCases* cases) {
  cases->groups += fmt::format(
      R"(    {0})
      if [[ $COMP_CWORD == 2 ]]; then
        COMPREPLY=($(compgen -W "{1} {2}" -- "$current"))
        return
      fi
      command="{0} ${{COMP_WORDS[2]}}"
      ;;
)",
      group.names.front(), FirstNames(group.commands), OptionWords(group));
}

void AddBashCases(const std::string& group, const DeclaredCommand& command, BashCases* cases) {
  const std::vector<std::string> command_paths = PathsOf(group, command);
  std::string words;
  bool paths = false;
  for (const DeclaredArgument& argument : command.arguments) {
    const std::string choices = fmt::format("{}", fmt::join(argument.choices, " "));
    if (IsPositional(argument)) {
      words += choices;
      paths = paths || TakesPath(argument);
    } else if (argument.value != Value::kNone) {
      cases->values += fmt::format("    {}) options= words=\"{}\" paths={} ;;\n",
                                   BashPattern(command_paths, argument), choices,
                                   TakesPath(argument) ? "yes" : "");
    }
  }
  std::vector<std::string> quoted;
  quoted.reserve(command_paths.size());
  for (const std::string& path : command_paths) quoted.push_back(Quoted(path));
  cases->options +=
      fmt::format("    {}) options=\"{}\" words=\"{}\" paths={} ;;\n", fmt::join(quoted, "|"),
                  OptionWords(command), words, paths ? "yes" : "");
}

/// Works with bash 3.2, which macOS has.
std::string BashScript(std::span<const DeclaredCommand> commands) {
  BashCases cases;
  for (const DeclaredCommand& command : commands) {
    if (command.commands.empty()) {
      AddBashCases("", command, &cases);
      continue;
    }
    AddBashGroup(command, &cases);
    for (const DeclaredCommand& member : command.commands) {
      AddBashCases(command.names.front() + " ", member, &cases);
    }
  }
  return fmt::format(
      R"(# bash completion of metal-marlin, written by: metal-marlin completion bash
_metal_marlin() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  local options= words= paths= command="${{COMP_WORDS[1]}}"
  # bash splits "--option=value" at the sign.
  if [[ $current == = ]]; then
    current=
  elif [[ $previous == = ]]; then
    previous="${{COMP_WORDS[COMP_CWORD-2]}}"
  fi
  COMPREPLY=()
  if [[ $COMP_CWORD == 1 ]]; then
    COMPREPLY=($(compgen -W "{} {}" -- "$current"))
    return
  fi
  case "$command" in
{}  esac
  case "$command" in
{}    *) return ;;
  esac
  case "$command:$previous" in
{}  esac
  if [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
    return
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  if [[ $paths ]]; then
    local IFS=$'\n'
    COMPREPLY+=($(compgen -f -- "$current"))
  fi
}}
complete -o filenames -F _metal_marlin metal-marlin
)",
      FirstNames(commands), kProgramOptions, cases.groups, cases.options, cases.values);
}

/// One argument of zsh's _arguments, or more for an option with several names.
std::string ZshArgument(const DeclaredArgument& argument) {
  const std::string choices = fmt::format("{}", fmt::join(argument.choices, " "));
  std::string action = " ";
  if (TakesPath(argument)) {
    action = choices.empty() ? "_files" : fmt::format("{{compadd -- {}; _files}}", choices);
  } else if (!choices.empty()) {
    action = fmt::format("({})", choices);
  }
  if (IsPositional(argument)) return Quoted(fmt::format("*:{}:{}", argument.names.front(), action));
  std::string text = fmt::format("[{}]", Replaced(argument.help, "[]:\\", "\\"));
  if (argument.value != Value::kNone) {
    text += fmt::format(":{}:{}", Replaced(argument.type, ":\\", "\\"), action);
  }
  std::vector<std::string> specifications;
  for (const std::string& name : argument.names) {
    specifications.push_back(Quoted(fmt::format("*{}{}", name, text)));
  }
  return fmt::format("{}", fmt::join(specifications, " "));
}

/// The function that completes the commands of a table and of its groups. `options` may stand in
/// place of a command.
std::string ZshFunctions(const std::string& name, std::span<const DeclaredCommand> commands,
                         const std::string& options) {
  std::string names;
  std::string cases;
  std::string groups;
  for (const DeclaredCommand& command : commands) {
    names += fmt::format(
        "    {}\n", Quoted(command.names.front() + ":" + Replaced(command.summary, ":\\", "\\")));
    cases += fmt::format("    {})\n      ", fmt::join(command.names, "|"));
    if (command.commands.empty()) {
      cases += "_arguments";
      for (const DeclaredArgument& argument : command.arguments) {
        cases += " \\\n        " + ZshArgument(argument);
      }
    } else {
      const std::string group = name + "_" + command.names.front();
      groups += ZshFunctions(group, command.commands, OptionWords(command));
      cases += group;
    }
    cases += "\n      ;;\n";
  }
  return groups + fmt::format(
                      R"({}() {{
  local -a commands
  commands=(
{}  )
  if (( CURRENT == 2 )); then
    if [[ $words[2] == -* ]]; then
      compadd -- {}
    else
      _describe command commands
    fi
    return
  fi
  shift words
  (( CURRENT-- ))
  case $words[1] in
{}  esac
}}
)",
                      name, names, options, cases);
}

std::string ZshScript(std::span<const DeclaredCommand> commands) {
  return fmt::format(
      R"(#compdef metal-marlin
# zsh completion of metal-marlin, written by: metal-marlin completion zsh
{}if [[ $funcstack[1] == _metal_marlin || $funcstack[1] == _metal-marlin ]]; then
  _metal_marlin "$@"
else
  compdef _metal_marlin metal-marlin
fi
)",
      ZshFunctions("_metal_marlin", commands, kProgramOptions));
}

/// Text in single quotes of fish.
std::string FishQuoted(std::string_view text) { return "'" + Replaced(text, "'\\", "\\") + "'"; }

std::string FishLine(const std::string& condition, const DeclaredArgument& argument) {
  std::string line = "complete -c metal-marlin -n " + FishQuoted(condition);
  for (const std::string& name : argument.names) {
    if (name.starts_with("--")) {
      line += " -l " + name.substr(2);
    } else if (name.starts_with('-')) {
      line += " -s " + name.substr(1);
    }
  }
  if (argument.value != Value::kNone && !IsPositional(argument)) line += " -r";
  line += TakesPath(argument) ? " -F" : " -f";
  if (!argument.choices.empty()) {
    line += " -a " + FishQuoted(fmt::format("{}", fmt::join(argument.choices, " ")));
  }
  return line + " -d " + FishQuoted(argument.help) + "\n";
}

void AddFishLines(const std::string& group, const DeclaredCommand& command, std::string* text) {
  const std::string shown = group.empty() ? "" : " " + group;
  *text += fmt::format("complete -c metal-marlin -n {} -a {} -d {}\n",
                       FishQuoted("__metal_marlin_expects" + shown), command.names.front(),
                       FishQuoted(command.summary));
  for (const DeclaredCommand& member : command.commands) {
    AddFishLines(command.names.front(), member, text);
  }
  if (!command.commands.empty()) {
    for (const DeclaredArgument& argument : command.arguments) {
      *text += FishLine("__metal_marlin_expects " + command.names.front(), argument);
    }
    return;
  }
  for (const std::string& name : command.names) {
    for (const DeclaredArgument& argument : command.arguments) {
      *text += FishLine(fmt::format("__metal_marlin_runs{} {}", shown, name), argument);
    }
  }
}

std::string FishScript(std::span<const DeclaredCommand> commands) {
  std::string text = R"(# fish completion of metal-marlin, written by: metal-marlin completion fish
function __metal_marlin_runs
  set -l words (commandline -opc)
  set -l last (math (count $argv) + 1)
  test (count $words) -ge $last; and test "$words[2..$last]" = "$argv"
end
function __metal_marlin_expects
  set -l words (commandline -opc)
  test (count $words) -eq (math (count $argv) + 1); and test "$words[2..-1]" = "$argv"
end
complete -c metal-marlin -f
complete -c metal-marlin -n __metal_marlin_expects -s h -l help -d 'Print this help'
complete -c metal-marlin -n __metal_marlin_expects -l version -d 'Print the version'
)";
  for (const DeclaredCommand& command : commands) AddFishLines("", command, &text);
  return text;
}

struct Shell {
  const char* name;
  std::string (*script)(std::span<const DeclaredCommand> commands);
};
constexpr Shell kShells[] = {{"bash", BashScript}, {"zsh", ZshScript}, {"fish", FishScript}};

}  // namespace

std::vector<std::string> CompletionShells() {
  std::vector<std::string> names;
  for (const Shell& shell : kShells) names.emplace_back(shell.name);
  return names;
}

Result<std::string> CompletionScript(const std::string& shell,
                                     std::span<const DeclaredCommand> commands) {
  for (const Shell& known : kShells) {
    if (known.name == shell) return known.script(commands);
  }
  return Invalid(fmt::format("SHELL: unknown shell '{}'; known: {}", Printable(shell),
                             fmt::join(CompletionShells(), ", ")));
}

}  // namespace marlin::cli
