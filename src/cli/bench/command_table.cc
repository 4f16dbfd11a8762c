#include "cli/command.h"

namespace marlin::cli {

#define MARLIN_BENCH_COMMAND(name, summary, example) std::unique_ptr<Command> Make_bench_##name();
#include "cli/bench/commands.def"
#undef MARLIN_BENCH_COMMAND

namespace {

constexpr CommandEntry kBenchCommands[] = {
#define MARLIN_BENCH_COMMAND(name, summary, example) \
  {#name, "Commands", summary, example, Make_bench_##name, nullptr},
#include "cli/bench/commands.def"
#undef MARLIN_BENCH_COMMAND
};

}  // namespace

std::span<const CommandEntry> Commands_bench() { return kBenchCommands; }

}  // namespace marlin::cli
