// Shell scripts that complete a command line, made from the declared commands.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "cli/arguments/arguments.h"
#include "marlin/status.h"

namespace marlin::cli {

/// The shells that CompletionScript knows.
std::vector<std::string> CompletionShells();

/// A script that completes the names of commands and options and the values of an option: those
/// declared with it, nothing for a number, otherwise paths. Errors: kInvalidArgument for an unknown
/// shell.
Result<std::string> CompletionScript(const std::string& shell,
                                     std::span<const DeclaredCommand> commands);

}  // namespace marlin::cli
