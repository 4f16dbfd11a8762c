// The metal-marlin command.
#include "cli/arguments.h"

int main(int argc, char** argv) { return marlin::cli::RunCommandLine(argc, argv); }
