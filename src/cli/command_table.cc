#include <iterator>

#include "cli/command.h"

namespace marlin::cli {

#define MARLIN_COMMAND(name, group, summary, example) std::unique_ptr<Command> Make_##name();
#include "cli/commands.def"
#undef MARLIN_COMMAND

namespace {

constexpr CommandEntry kCommands[] = {
#define MARLIN_COMMAND(name, group, summary, example) {#name, group, summary, example, Make_##name},
#include "cli/commands.def"
#undef MARLIN_COMMAND
};

}  // namespace

std::span<const CommandEntry> AllCommands() { return kCommands; }

}  // namespace marlin::cli
