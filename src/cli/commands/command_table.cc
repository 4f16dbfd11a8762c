#include "cli/command.h"

namespace marlin::cli {

#define MARLIN_COMMAND(name, group, summary, example) std::unique_ptr<Command> Make_##name();
#define MARLIN_COMMAND_GROUP(name, group, summary, example) \
  std::span<const CommandEntry> Commands_##name();
#define MARLIN_COMMAND_ALIAS(name, command)
#include "cli/commands.def"
#undef MARLIN_COMMAND_ALIAS
#undef MARLIN_COMMAND_GROUP
#undef MARLIN_COMMAND

namespace {

constexpr CommandEntry kCommands[] = {
#define MARLIN_COMMAND(name, group, summary, example) \
  {#name, group, summary, example, Make_##name, nullptr},
#define MARLIN_COMMAND_GROUP(name, group, summary, example) \
  {#name, group, summary, example, nullptr, Commands_##name},
#define MARLIN_COMMAND_ALIAS(name, command)
#include "cli/commands.def"
#undef MARLIN_COMMAND_ALIAS
#undef MARLIN_COMMAND_GROUP
#undef MARLIN_COMMAND
};

constexpr CommandAlias kAliases[] = {
#define MARLIN_COMMAND(name, group, summary, example)
#define MARLIN_COMMAND_GROUP(name, group, summary, example)
#define MARLIN_COMMAND_ALIAS(name, command) {#name, #command},
#include "cli/commands.def"
#undef MARLIN_COMMAND_ALIAS
#undef MARLIN_COMMAND_GROUP
#undef MARLIN_COMMAND
};

}  // namespace

std::span<const CommandEntry> AllCommands() { return kCommands; }
std::span<const CommandAlias> AllCommandAliases() { return kAliases; }

}  // namespace marlin::cli
