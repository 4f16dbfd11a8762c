#include <iterator>

#include "cli/command.h"

namespace marlin::cli {

#define MARLIN_COMMAND(name, group, summary, example) std::unique_ptr<Command> Make_##name();
#define MARLIN_COMMAND_GROUP(name, group, summary, example) \
  std::span<const CommandEntry> Commands_##name();
#include "cli/commands.def"
#undef MARLIN_COMMAND
#undef MARLIN_COMMAND_GROUP

namespace {

constexpr CommandEntry kCommands[] = {
#define MARLIN_COMMAND(name, group, summary, example) \
  {#name, group, summary, example, Make_##name, nullptr},
#define MARLIN_COMMAND_GROUP(name, group, summary, example) \
  {#name, group, summary, example, nullptr, Commands_##name},
#include "cli/commands.def"
#undef MARLIN_COMMAND
#undef MARLIN_COMMAND_GROUP
};

}  // namespace

std::span<const CommandEntry> AllCommands() { return kCommands; }

}  // namespace marlin::cli
