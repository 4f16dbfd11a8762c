#include "cli/help_formatter.h"

#include <fmt/core.h>

#include <CLI/App.hpp>
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

}  // namespace

std::string HelpFormatter::make_option(const CLI::Option* option, bool is_positional) const {
  return Entry(make_option_name(option, is_positional) + make_option_opts(option),
               make_option_desc(option));
}

std::string HelpFormatter::make_subcommand(const CLI::App* command) const {
  return Entry(command->get_name(), command->get_description());
}

std::string HelpFormatter::make_description(const CLI::App* app) const {
  return app->get_description() + "\n";
}

}  // namespace marlin::cli
