// The interface of a metal-marlin command: it declares its arguments, then runs.
#pragma once

#include <memory>
#include <span>

#include "cli/arguments/arguments.h"
#include "cli/console.h"
#include "marlin/status.h"

namespace marlin::cli {

class Command {
 public:
  virtual ~Command() = default;
  /// Binds options and positionals to members; called once, before Run. Every command has --json
  /// without declaring it.
  virtual void Declare(ArgumentList& arguments) = 0;
  /// Checks the arguments, before models that they name are downloaded. An error as of Run.
  virtual Status Check(const Console& /*console*/) const { return {}; }
  /// Runs the command. An error becomes one line on stderr and the exit code.
  virtual Status Run(Console& console) = 0;
};

/// One row of a command table: a command, or a group of commands such as `bench`.
struct CommandEntry {
  const char* name;
  const char* group;  ///< The heading of --help.
  const char* summary;
  const char* example;
  std::unique_ptr<Command> (*make)();           ///< Null for a group.
  std::span<const CommandEntry> (*commands)();  ///< The commands of a group; otherwise null.
};

/// Another name of a command, which --help does not list as one of its own.
struct CommandAlias {
  const char* name;
  const char* command;
};

/// The aliases of commands.def.
std::span<const CommandAlias> AllCommandAliases();

/// All commands, in the order of --help; defined in commands.def.
std::span<const CommandEntry> AllCommands();

}  // namespace marlin::cli
