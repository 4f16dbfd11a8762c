// The metal-marlin command.
#include <csignal>

#include "cli/arguments.h"

int main(int argc, char** argv) {
  // A file past the limit of `ulimit -f` is then an error of the call that writes it.
  std::signal(SIGXFSZ, SIG_IGN);
  return marlin::cli::RunCommandLine(argc, argv);
}
