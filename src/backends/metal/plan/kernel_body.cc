#include "backends/metal/plan/kernel_body.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <optional>

#include "backends/metal/plan/kernel_files.h"
#include "backends/metal/plan/kernel_text.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

constexpr std::string_view kSpace = " \n";

std::string_view Trim(std::string_view text) {
  const size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

/// The comma-separated parts, trimmed.
std::vector<std::string_view> Split(std::string_view text) {
  std::vector<std::string_view> parts;
  while (!Trim(text).empty()) {
    const size_t end = std::min(text.find(','), text.size());
    parts.push_back(Trim(text.substr(0, end)));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

/// The text between the first `begin` and the next `end`.
std::optional<std::string_view> Between(std::string_view text, std::string_view begin,
                                        std::string_view end) {
  const size_t at = text.find(begin);
  if (at == std::string_view::npos) return std::nullopt;
  text.remove_prefix(at + begin.size());
  const size_t length = text.find(end);
  if (length == std::string_view::npos) return std::nullopt;
  return text.substr(0, length);
}

/// Type and name of a declaration: the name is its last word.
std::pair<std::string_view, std::string_view> SplitName(std::string_view declaration) {
  const size_t space = declaration.find_last_of(" &*");
  return {Trim(declaration.substr(0, space + 1)), declaration.substr(space + 1)};
}

/// A kernel's definition in the text of its file.
struct Definition {
  std::string_view template_parameters;  ///< "typename T, int kBuffers"
  std::string_view parameters;
  std::string_view statements;
};

std::optional<Definition> FindDefinition(std::string_view text, std::string_view kernel) {
  const std::string signature = fmt::format(" void {}(", kernel);
  const size_t at = text.find(signature);
  if (at == std::string_view::npos) return std::nullopt;
  Definition definition;
  // Definitions are separated by blank lines.
  const std::string_view before = text.substr(0, at);
  const size_t blank = before.rfind("\n\n");
  definition.template_parameters =
      Between(before.substr(blank == std::string_view::npos ? 0 : blank), "template <", ">\n")
          .value_or("");
  const std::string_view rest = text.substr(at);
  const auto parameters = Between(rest, signature, ") {\n");
  const auto statements = Between(rest, ") {\n", "\n}\n");
  if (!parameters || !statements) return std::nullopt;
  definition.parameters = *parameters;
  definition.statements = *statements;
  return definition;
}

/// A template instance: MARLIN_GEMV("marlin_gemv_4", 4) is marlin_gemv<4>. A kernel that is not a
/// template is its own instance, without arguments.
struct Instance {
  std::string kernel;
  std::vector<std::string_view> arguments;
};

Instance FindInstance(std::string_view text, std::string_view function) {
  const std::string quoted = fmt::format("(\"{}\"", function);
  const size_t at = text.find(quoted);
  if (at == std::string_view::npos) return {std::string(function), {}};
  const size_t line = text.rfind('\n', at) + 1;
  Instance instance;
  for (const char c : text.substr(line, at - line)) {
    instance.kernel.push_back(static_cast<char>(std::tolower(static_cast<unsigned char>(c))));
  }
  instance.arguments = Split(Between(text.substr(at), quoted, ")").value_or(""));
  if (!instance.arguments.empty() && instance.arguments.front().empty()) {
    instance.arguments.erase(instance.arguments.begin());
  }
  return instance;
}

/// The components of a grid-position variable that `type` needs: it is a uint3 in the signature.
std::string PlaceExpression(std::string_view attribute, std::string_view type) {
  const bool three = attribute.find("_position_in_") != std::string_view::npos ||
                     attribute.ends_with("_per_grid") || attribute == "threads_per_threadgroup";
  if (!three) return std::string(attribute);
  const char* part = type.ends_with('3') ? "" : (type.ends_with('2') ? ".xy" : ".x");
  return fmt::format("{}{}", attribute, part);
}

Status Malformed(std::string_view what) {
  return Status(Code::kInternal, fmt::format("kernel: cannot read '{}'", what));
}

/// Declares a kernel parameter as a local variable, initialised from the generated signature.
Status AddParameter(std::string_view parameter, KernelBody* body) {
  const auto attribute = Between(parameter, "[[", "]]");
  if (!attribute) return Malformed(parameter);
  const auto [type, name] = SplitName(Trim(parameter.substr(0, parameter.find("[["))));
  const auto buffer = Between(*attribute, "buffer(", ")");
  if (!buffer) {
    body->source +=
        fmt::format("const {} {} = {}({});\n", type, name, type, PlaceExpression(*attribute, type));
    return Status();
  }
  MARLIN_ASSIGN_OR_RETURN(const int index, NumberOfMacro(*buffer));
  const std::string argument = fmt::format("marlin_{}", name);
  body->arguments.push_back(
      {argument, index, type.find("const") == std::string_view::npos && type.back() == '*'});
  if (type.starts_with("constant ") && type.ends_with('&')) {
    const std::string_view value = Trim(Between(type, "constant ", "&").value_or(""));
    body->source +=
        fmt::format("const {} {} = *(const device {}*)({});\n", value, name, value, argument);
  } else {
    body->source += fmt::format("{} {} = ({})({});\n", type, name, type, argument);
  }
  return Status();
}

/// The text of the files that a kernel's file includes.
Result<std::string> HeaderOf(std::string_view text, const FunctionConstants& constants) {
  std::string header;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size() - 1) + 1;
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end);
    if (const auto path = Between(line, "#include \"", "\"")) {
      MARLIN_ASSIGN_OR_RETURN(const std::string part,
                              KernelText(path->substr(path->rfind('/') + 1), constants));
      header += part;
    } else if (line.starts_with("#include")) {
      header += line;
    }
  }
  return header;
}

Status Unknown(std::string_view what) {
  return Status(Code::kInvalidArgument, fmt::format("{}: no such kernel", what));
}

}  // namespace

Result<KernelBody> BodyOfKernel(std::string_view file, std::string_view function,
                                const FunctionConstants& constants) {
  const std::string path = PathOfKernelFile(file);
  const auto files = KernelFiles();
  const auto found = std::find_if(files.begin(), files.end(),
                                  [&](const KernelFile& known) { return known.path == path; });
  if (found == files.end()) return Unknown(file);
  const Instance instance = FindInstance(found->text, function);
  const auto definition = FindDefinition(found->text, instance.kernel);
  if (!definition) return Unknown(function);
  const std::vector<std::string_view> names = Split(definition->template_parameters);
  if (names.size() != instance.arguments.size()) return Unknown(function);

  KernelBody body;
  MARLIN_ASSIGN_OR_RETURN(body.header, HeaderOf(found->text, constants));
  // Without this, compilers attribute errors of the body to the last file of the header.
  body.header += fmt::format("#line 1 \"{}\"\n", function);
  for (size_t i = 0; i < names.size(); ++i) {
    body.template_arguments.emplace_back(SplitName(names[i]).second, instance.arguments[i]);
  }
  body.source = "using namespace metal;\nusing namespace marlin::kernels;\n";
  for (const std::string_view parameter : Split(definition->parameters)) {
    MARLIN_RETURN_IF_ERROR(AddParameter(parameter, &body));
  }
  body.source.append(definition->statements).push_back('\n');
  return body;
}

}  // namespace marlin::metal
