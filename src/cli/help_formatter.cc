#include "cli/help_formatter.h"

#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Formatter.hpp>
#include <string_view>

namespace marlin::cli {
namespace {

constexpr size_t kColumns = 100;
/// Where descriptions begin; below names that are longer.
constexpr size_t kIndent = 30;

/// The words of a description in lines behind, or below, a name.
std::string Entry(const std::string& name, std::string_view description) {
  std::string text = "  " + name;
  if (text.size() + 2 > kIndent) {
    text += fmt::format("\n{:{}}", "", kIndent);
  } else {
    text.resize(kIndent, ' ');
  }
  size_t column = kIndent;
  while (!description.empty()) {
    const size_t end = std::min(description.find(' '), description.size());
    const std::string_view word = description.substr(0, end);
    description.remove_prefix(std::min(end + 1, description.size()));
    if (column > kIndent && column + 1 + word.size() > kColumns) {
      text += fmt::format("\n{:{}}", "", kIndent);
      column = kIndent;
    }
    if (column > kIndent) {
      text += ' ';
      ++column;
    }
    text += word;
    column += word.size();
  }
  return text + "\n";
}

class HelpFormatter final : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    return Entry(make_option_name(option, is_positional) + make_option_opts(option),
                 make_option_desc(option));
  }
  std::string make_subcommand(const CLI::App* command) const override {
    return Entry(command->get_name(), command->get_description());
  }
  /// Leaves out that a command is required, which the usage says.
  std::string make_description(const CLI::App* app) const override {
    return app->get_description() + "\n";
  }
};

}  // namespace

std::shared_ptr<CLI::FormatterBase> MakeHelpFormatter() {
  return std::make_shared<HelpFormatter>();
}

}  // namespace marlin::cli
