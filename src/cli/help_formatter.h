// --help in lines of at most 100 columns.
#pragma once

#include <CLI/Formatter.hpp>
#include <string>

namespace marlin::cli {

class HelpFormatter final : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
  /// Leaves out that a command is required, which the usage says.
  std::string make_description(const CLI::App* app) const override;
};

}  // namespace marlin::cli
