#include "cli/arguments/help_formatter.h"

#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace marlin::cli {
namespace {

constexpr size_t kColumns = 100;
/// Where descriptions begin; below names that are longer.
constexpr size_t kIndent = 30;

/// The words of a description in lines next to, or below, a name.
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

/// "-o, --output DST".
std::string NameText(const CLI::Option* option, const std::string& name) {
  std::string text;
  for (const char c : name) text += c == ',' ? std::string(", ") : std::string(1, c);
  const std::string type = option->get_type_size() == 0 ? "" : option->get_type_name();
  return type.empty() ? text : text + " " + type;
}

class HelpFormatter final : public CLI::Formatter {
 public:
  HelpFormatter() { label("Positionals", "Arguments"); }

  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    std::string description = make_option_desc(option);
    if (!is_positional && option->get_required()) description += " (required)";
    if (!option->get_default_str().empty()) {
      description += fmt::format(" (default {})", option->get_default_str());
    }
    return Entry(NameText(option, make_option_name(option, is_positional)), description);
  }
  std::string make_subcommand(const CLI::App* command) const override {
    return Entry(command->get_display_name(true), command->get_description());
  }
  /// Leaves out that a command is required, which the usage says.
  std::string make_description(const CLI::App* app) const override {
    return app->get_description() + "\n\n";
  }
  /// "metal-marlin quantize SRC -o DST [OPTIONS]".
  std::string make_usage(const CLI::App* app, std::string name) const override {
    std::string text = "Usage: " + name;
    for (const CLI::Option* option : app->get_options({})) {
      if (option->get_positional()) text += " " + make_option_usage(option);
    }
    for (const CLI::Option* option : app->get_options({})) {
      if (option->get_positional() || !option->get_required()) continue;
      const std::string names = option->get_name(false, true);
      text += " " + names.substr(0, names.find(',')) + " " + option->get_type_name();
    }
    return text + (app->get_subcommands({}).empty() ? "" : " COMMAND") + " [OPTIONS]\n";
  }
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override {
    return make_description(app) + make_usage(app, std::move(name)) + make_positionals(app) +
           make_subcommands(app, mode) + OptionGroups(app) + "\n" + make_footer(app);
  }

 private:
  /// The options of every command come last.
  std::string OptionGroups(const CLI::App* app) const {
    std::vector<std::string> groups = app->get_groups();
    std::stable_partition(groups.begin(), groups.end(),
                          [](const std::string& group) { return group != kGeneralGroup; });
    std::string text;
    for (const std::string& group : groups) {
      const auto options = app->get_options([&group](const CLI::Option* option) {
        return option->get_group() == group && option->nonpositional();
      });
      if (!options.empty()) text += make_group(group, false, options);
    }
    return text;
  }
};

}  // namespace

std::shared_ptr<CLI::FormatterBase> MakeHelpFormatter() {
  return std::make_shared<HelpFormatter>();
}

}  // namespace marlin::cli
