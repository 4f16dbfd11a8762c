// The metal-marlin command.
#include <csignal>

#include "cli/command_line.h"

int main(int argc, char** argv) {
  // Exceeding `ulimit -f` then becomes an error of the write call.
  std::signal(SIGXFSZ, SIG_IGN);
  return marlin::cli::RunCommandLine(argc, argv);
}
