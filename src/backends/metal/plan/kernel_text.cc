#include "backends/metal/plan/kernel_text.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>

#include "backends/metal/plan/kernel_files.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

Result<std::string_view> TextOf(std::string_view path) {
  for (const KernelFile& file : KernelFiles()) {
    if (file.path == path) return file.text;
  }
  return Status(Code::kInvalidArgument, fmt::format("{}: not a kernel source file", path));
}

/// Removes and returns the first line of a text.
std::string_view TakeLine(std::string_view* text) {
  const size_t length = std::min(text->find('\n'), text->size());
  const std::string_view line = text->substr(0, length);
  text->remove_prefix(std::min(length + 1, text->size()));
  return line;
}

/// The part of `line` between `before`, at its start, and the next `after`; nullopt: no match.
std::optional<std::string_view> AfterPrefix(std::string_view line, std::string_view before,
                                            std::string_view after) {
  if (!line.starts_with(before)) return std::nullopt;
  line.remove_prefix(before.size());
  const size_t end = line.find(after);
  if (end == std::string_view::npos) return std::nullopt;
  return line.substr(0, end);
}

/// Appends a file with its #include lines expanded in place, each file once.
Status Append(std::string_view path, std::set<std::string_view>* seen, std::string* out) {
  if (!seen->insert(path).second) return Status();
  MARLIN_ASSIGN_OR_RETURN(std::string_view rest, TextOf(path));
  *out += fmt::format("#line 1 \"{}\"\n", path);
  for (int number = 1; !rest.empty(); ++number) {
    const std::string_view line = TakeLine(&rest);
    if (const auto included = AfterPrefix(line, "#include \"", "\"")) {
      MARLIN_RETURN_IF_ERROR(Append(*included, seen, out));
      *out += fmt::format("#line {} \"{}\"\n", number + 1, path);
    } else {
      out->append(line).push_back('\n');
    }
  }
  return Status();
}

/// `constant int NAME [[function_constant(MACRO)]];`
struct Declared {
  std::string_view name;
  std::string_view macro;
};
std::optional<Declared> DeclaredConstant(std::string_view line) {
  constexpr std::string_view kAttribute = " [[function_constant(";
  const auto name = AfterPrefix(line, "constant int ", kAttribute);
  if (!name) return std::nullopt;
  const auto macro = AfterPrefix(line.substr(line.find(kAttribute)), kAttribute, ")]];");
  return Declared{*name, macro.value_or("")};
}

}  // namespace

Result<std::string> KernelText(std::string_view file) {
  const std::string path = PathOfKernelFile(file);
  std::set<std::string_view> seen;
  std::string text;
  MARLIN_RETURN_IF_ERROR(Append(path, &seen, &text));
  return text;
}

Result<std::string> KernelText(std::string_view file, const FunctionConstants& constants) {
  MARLIN_ASSIGN_OR_RETURN(const std::string general, KernelText(file));
  std::string text;
  std::string_view rest = general;
  while (!rest.empty()) {
    const std::string_view line = TakeLine(&rest);
    if (const auto declared = DeclaredConstant(line)) {
      MARLIN_ASSIGN_OR_RETURN(const int number, NumberOfMacro(declared->macro));
      text += fmt::format("constant constexpr int {} = {};\n", declared->name,
                          constants.at(static_cast<size_t>(number)));
    } else {
      text.append(line).push_back('\n');
    }
  }
  return text;
}

Result<std::vector<FunctionConstant>> ListFunctionConstants() {
  MARLIN_ASSIGN_OR_RETURN(std::string_view rest, TextOf("backends/metal/kernels/constants.h"));
  std::vector<FunctionConstant> constants;
  while (!rest.empty()) {
    const auto declared = DeclaredConstant(TakeLine(&rest));
    if (!declared) continue;
    MARLIN_ASSIGN_OR_RETURN(const int number, NumberOfMacro(declared->macro));
    constants.push_back({declared->name, number});
  }
  return constants;
}

Result<int> NumberOfMacro(std::string_view name) {
  MARLIN_ASSIGN_OR_RETURN(const std::string_view text,
                          TextOf("backends/metal/kernels/parameters.h"));
  const std::string define = fmt::format("#define {} ", name);
  const size_t at = text.find(define);
  int number = -1;
  if (at != std::string_view::npos) {
    std::string_view value = text.substr(at + define.size());
    // A long #define continues on the next line.
    value.remove_prefix(std::min(value.find_first_not_of(" \\\n"), value.size()));
    std::from_chars(value.data(), value.data() + value.size(), number);
  }
  if (number >= 0) return number;
  return Status(Code::kInternal, fmt::format("{}: no number in parameters.h", name));
}

}  // namespace marlin::metal
