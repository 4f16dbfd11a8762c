#include "cli/arguments/arguments.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <string_view>

namespace marlin::cli {
namespace {

/// Numbers are parsed here rather than by CLI11, which reads an empty value as 0 and clamps values
/// that are too large.
template <typename T, typename Range>
CLI::Option* AddNumber(CLI::App& app, const char* names, std::optional<T>* value,
                       const Range& range, const char* type, const char* help) {
  return app
      .add_option_function<std::string>(
          names,
          [=](const std::string& text) {
            const Result<T> number = ParseOption(names, text, range);
            if (!number.ok()) throw CLI::ValidationError(number.status().message());
            *value = *number;
          },
          help)
      ->type_name(type);
}

}  // namespace

CLI::Option* ArgumentList::Placed(CLI::Option* option) const { return option->group(group_); }

void ArgumentList::Record(const char* names, DeclaredArgument::Value value, const char* type,
                          const char* help) {
  DeclaredArgument argument{{}, type, help, value, {}};
  std::string_view rest = names;
  while (!rest.empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    argument.names.emplace_back(rest.substr(0, comma));
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  declared_.push_back(std::move(argument));
}

void ArgumentList::Positional(const char* name, std::string* value, const char* help) {
  Record(name, DeclaredArgument::Value::kText, "", help);
  positionals_.emplace_back(value, app_.add_option(name, *value, help)->required()->type_name(""));
}

void ArgumentList::Positional(const char* name, std::optional<std::string>* value,
                              const char* help) {
  Record(name, DeclaredArgument::Value::kText, "", help);
  CLI::Option* const option = app_.add_option_function<std::string>(
      name, [value](const std::string& given) { *value = given; }, help);
  positionals_.emplace_back(value, option->type_name(""));
}

void ArgumentList::Option(const char* names, std::string* value, const char* type,
                          const char* help) {
  Record(names, DeclaredArgument::Value::kText, type, help);
  Placed(app_.add_option(names, *value, help))->type_name(type)->capture_default_str();
}

void ArgumentList::Option(const char* names, std::optional<std::string>* value, const char* type,
                          const char* help) {
  Record(names, DeclaredArgument::Value::kText, type, help);
  Placed(app_.add_option_function<std::string>(
             names, [value](const std::string& given) { *value = given; }, help))
      ->type_name(type);
}

void ArgumentList::Option(const char* names, std::optional<int64_t>* value, const WholeRange& range,
                          const char* type, const char* help) {
  Record(names, DeclaredArgument::Value::kNumber, type, help);
  Placed(AddNumber(app_, names, value, range, type, help));
}

void ArgumentList::Option(const char* names, std::optional<double>* value, const RealRange& range,
                          const char* type, const char* help) {
  Record(names, DeclaredArgument::Value::kNumber, type, help);
  Placed(AddNumber(app_, names, value, range, type, help));
}

void ArgumentList::Option(const char* names, std::vector<std::string>* values, const char* type,
                          const char* help) {
  Record(names, DeclaredArgument::Value::kText, type, help);
  // One value per occurrence: "--override A B" must not swallow the positional B. CLI11 would also
  // read "[A,B]" as two values, in recursion, and "--stop [END]" as "END".
  Placed(app_.add_option(names, *values, help))
      ->type_name(type)
      ->expected(1)
      ->take_all()
      ->allow_extra_args(false);
}

void ArgumentList::OptionalValue(const char* names, std::optional<std::string>* value,
                                 const char* type, const char* help) {
  Record(names, DeclaredArgument::Value::kText, type, help);
  Placed(app_.add_option_function<std::string>(
             names, [value](const std::string& given) { *value = given; }, help))
      ->type_name(type)
      ->expected(0, 1);
}

void ArgumentList::RequiredOption(const char* names, std::string* value, const char* type,
                                  const char* help) {
  Record(names, DeclaredArgument::Value::kText, type, help);
  Placed(app_.add_option(names, *value, help))->required()->type_name(type);
}

void ArgumentList::Flag(const char* names, bool* value, const char* help) {
  Record(names, DeclaredArgument::Value::kNone, "", help);
  Placed(app_.add_flag(names, *value, help));
}

void ArgumentList::Exclude(const char* option, const char* group) {
  for (CLI::Option* other : app_.get_options()) {
    if (other->get_group() == group) app_.get_option(option)->excludes(other);
  }
}

void ArgumentList::SayHub(const void* value) {
  for (const auto& [place, option] : positionals_) {
    if (place == value)
      option->description(option->get_description() + "; or org/name, a model of the Hub");
  }
}

void ArgumentList::Model(std::string* value, ModelPart part) {
  SayHub(value);
  models_.push_back({[value] { return value->empty() ? nullptr : value; }, part});
}

void ArgumentList::Model(std::optional<std::string>* value, ModelPart part) {
  SayHub(value);
  models_.push_back({[value] { return value->has_value() ? &**value : nullptr; }, part});
}

}  // namespace marlin::cli
