// completion: prints a script for shells that completes the command line.
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "cli/arguments/completion_script.h"
#include "cli/command.h"

namespace marlin::cli {
namespace {

class CompletionCommand final : public Command {
 public:
  void Declare(ArgumentList& arguments) override {
    arguments.Positional("SHELL", &shell_, "bash, zsh or fish");
    arguments.Choices(CompletionShells());
  }

  Status Run(Console& console) override {
    MARLIN_ASSIGN_OR_RETURN(const std::string script, CompletionScript(shell_, DeclareCommands()));
    return console.json() ? console.PrintJson({{"shell", shell_}, {"script", script}})
                          : console.Print(script);
  }

 private:
  std::string shell_;
};

}  // namespace

std::unique_ptr<Command> Make_completion() { return std::make_unique<CompletionCommand>(); }

}  // namespace marlin::cli
