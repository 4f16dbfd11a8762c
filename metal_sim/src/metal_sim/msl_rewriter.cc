// The steps of the rewriting in order, and the table that the simulator finds kernels by.
#include "metal_sim/msl_rewriter.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "metal_sim/msl_address_spaces.h"
#include "metal_sim/msl_constants.h"
#include "metal_sim/msl_constructors.h"
#include "metal_sim/msl_declarations.h"
#include "metal_sim/msl_expressions.h"
#include "metal_sim/msl_kernels.h"
#include "metal_sim/msl_overloads.h"
#include "metal_sim/msl_source.h"
#include "metal_sim/msl_threadgroup.h"

namespace metal_sim {
namespace {

/// The name of a source's enumerator.
std::string_view SourceName(Source source) {
  switch (source) {
    case Source::kBuffer:
      return "kBuffer";
    case Source::kThreadgroupMemory:
      return "kThreadgroupMemory";
    case Source::kThreadPositionInGrid:
      return "kThreadPositionInGrid";
    case Source::kThreadPositionInThreadgroup:
      return "kThreadPositionInThreadgroup";
    case Source::kThreadgroupPositionInGrid:
      return "kThreadgroupPositionInGrid";
    case Source::kThreadIndexInThreadgroup:
      return "kThreadIndexInThreadgroup";
    case Source::kThreadIndexInSimdgroup:
      return "kThreadIndexInSimdgroup";
    case Source::kSimdgroupIndexInThreadgroup:
      return "kSimdgroupIndexInThreadgroup";
    case Source::kThreadIndexInQuadgroup:
      return "kThreadIndexInQuadgroup";
    case Source::kQuadgroupIndexInThreadgroup:
      return "kQuadgroupIndexInThreadgroup";
    case Source::kThreadsPerThreadgroup:
      return "kThreadsPerThreadgroup";
    case Source::kThreadsPerGrid:
      return "kThreadsPerGrid";
    case Source::kThreadgroupsPerGrid:
      return "kThreadgroupsPerGrid";
    case Source::kSimdgroupsPerThreadgroup:
      return "kSimdgroupsPerThreadgroup";
    case Source::kThreadsPerSimdgroup:
      return "kThreadsPerSimdgroup";
    case Source::kDispatchThreadsPerThreadgroup:
      return "kDispatchThreadsPerThreadgroup";
  }
  return "";
}

/// A string literal. Names can hold quotes: template arguments may be character literals.
std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + '"';
}

/// Opens the namespaces of the kernel for its template arguments, which were written inside them.
std::string UsingDirective(const std::string& expression) {
  const size_t end = expression.substr(0, expression.find('<')).rfind("::");
  if (end == std::string::npos) return "";
  return fmt::format("using namespace ::metal_sim_program::{}; ", expression.substr(0, end));
}

/// The function that says whether the argument is there, after a comma; nothing where it always is.
/// A constant that is computed from function constants has become a function (msl_constants.h).
std::string PresenceText(const KernelArgument& argument, const std::string& scope,
                         const std::vector<ConstantEntry>& constants) {
  if (argument.condition.empty()) return "";
  bool plain = false;
  for (const ConstantEntry& constant : constants) {
    plain = plain || constant.name == argument.condition ||
            constant.name.ends_with("::" + argument.condition);
  }
  return fmt::format(", []() -> bool {{ {}using namespace ::metal_sim_program; return {}{}; }}",
                     scope, argument.condition, plain ? "" : "__value()");
}

/// The arguments of kernel `number` and the function that runs it.
std::string KernelFunctions(const KernelEntry& kernel, size_t number,
                            const std::vector<ConstantEntry>& constants) {
  // An array cannot be empty: a kernel without parameters gets one that is not counted.
  const size_t extent = kernel.arguments.empty() ? 1 : kernel.arguments.size();
  std::string text =
      fmt::format("static constexpr ::metal_sim::Argument kArguments_{}[{}] = {{", number, extent);
  for (const KernelArgument& argument : kernel.arguments) {
    text += fmt::format("{{::metal_sim::Source::{}, {}, \"{}\"{}}}, ", SourceName(argument.source),
                        argument.index, argument.name,
                        PresenceText(argument, UsingDirective(kernel.expression), constants));
  }
  text += fmt::format(
      "}};\nstatic void Run_{}() {{ {}::metal_sim::Invoke(&::metal_sim_program::{}, "
      "kArguments_{}); }}\n",
      number, UsingDirective(kernel.expression), kernel.expression, number);
  return text;
}

/// `static constexpr TYPE NAME[] = {...};`, or a null pointer where there is nothing to list.
std::string Table(std::string_view type, std::string_view name, const std::string& rows) {
  if (rows.empty()) {
    return fmt::format("static constexpr const ::metal_sim::{}* {} = nullptr;\n", type, name);
  }
  return fmt::format("static constexpr ::metal_sim::{} {}[] = {{\n{}}};\n", type, name, rows);
}

/// The end of the rewritten text: shim/abi.h's Module and the function that returns it.
std::string ModuleText(const std::vector<KernelEntry>& kernels,
                       const std::vector<ConstantEntry>& constants) {
  std::string functions;
  std::string kernel_rows;
  for (size_t i = 0; i < kernels.size(); ++i) {
    functions += KernelFunctions(kernels[i], i, constants);
    kernel_rows += fmt::format("{{{}, kArguments_{}, {}, Run_{}, {}}},\n", Quoted(kernels[i].name),
                               i, kernels[i].arguments.size(), i, kernels[i].max_threads);
  }
  std::string constant_rows;
  for (const ConstantEntry& constant : constants) {
    functions += fmt::format("METAL_SIM_CONSTANT_STORAGE({})\n", constant.index);
    constant_rows += fmt::format(
        "{{{}, \"{}\", ::metal_sim::StorageOf(::metal_sim_program::{}), "
        "sizeof(::metal_sim_program::{}), "
        "::metal_sim::StorageOf(::metal_sim_program::{}__defined)}},\n",
        constant.index, constant.name, constant.name, constant.name, constant.name);
  }
  std::string text = "\n#line 1 \"metal_sim_module\"\nnamespace metal_sim_table {\n";
  text += functions;
  text += Table("Kernel", "kKernels", kernel_rows);
  text += Table("FunctionConstant", "kConstants", constant_rows);
  text += fmt::format(
      "static constexpr ::metal_sim::Module kModule = {{kKernels, {}, kConstants, {}}};\n"
      "}}  // namespace metal_sim_table\n"
      "}}  // namespace metal_sim_program\n"
      "extern \"C\" __attribute__((visibility(\"default\"))) const metal_sim::Module* "
      "metal_sim_module() {{\n"
      "  return &metal_sim_program::metal_sim_table::kModule;\n"
      "}}\n",
      kernels.size(), constants.size());
  return text;
}

/// The end of a text that is only checked: it uses every kernel, so that templates are
/// instantiated.
std::string UsesText(const std::vector<KernelEntry>& kernels) {
  std::string text = "\n#line 1 \"metal_sim_module\"\n";
  for (size_t i = 0; i < kernels.size(); ++i) {
    text += fmt::format("static auto metal_sim_use_{}() {{ {}return &::metal_sim_program::{}; }}\n",
                        i, UsingDirective(kernels[i].expression), kernels[i].expression);
  }
  return text + "}  // namespace metal_sim_program\n";
}

/// Leaves the kernels that `names` lists. Errors: kInvalidArgument, naming those that there are.
Status Select(const std::vector<std::string>& names, std::vector<KernelEntry>* kernels) {
  std::vector<KernelEntry> selected;
  for (const std::string& name : names) {
    const auto found = std::find_if(kernels->begin(), kernels->end(),
                                    [&](const KernelEntry& kernel) { return kernel.name == name; });
    if (found == kernels->end()) {
      std::vector<std::string> known;
      for (const KernelEntry& kernel : *kernels) known.push_back(kernel.name);
      return Status(Code::kInvalidArgument, NoKernelText(name, known));
    }
    selected.push_back(*found);
  }
  if (!names.empty()) *kernels = std::move(selected);
  return Status();
}

}  // namespace

Result<RewrittenSource> RewriteMetal(std::string_view preprocessed, RewritePurpose purpose,
                                     const std::vector<std::string>& kernels) {
  const bool runs = purpose == RewritePurpose::kRun;
  METAL_SIM_ASSIGN_OR_RETURN(const std::string text, runs ? MergeOverloads(preprocessed)
                                                          : Result(std::string(preprocessed)));
  METAL_SIM_ASSIGN_OR_RETURN(MslSource source, MslSource::Parse(text));
  METAL_SIM_ASSIGN_OR_RETURN(const std::vector<Declaration> declarations, ListDeclarations(source));
  RewrittenSource result;
  METAL_SIM_ASSIGN_OR_RETURN(result.kernels, CollectKernels(source, declarations));
  METAL_SIM_ASSIGN_OR_RETURN(result.constants, RewriteConstants(source, declarations));
  METAL_SIM_RETURN_IF_ERROR(RewriteThreadgroupVariables(source, purpose));
  RewriteExpressions(source, purpose);
  if (!runs) {
    result.refused = FindPointersWithoutSpace(source);
    for (std::string& word : FindRefusedWords(source)) result.refused.push_back(std::move(word));
    RewriteConstructors(source);
  }
  // The line that opens the namespace is in front of the source's first.
  result.text = "namespace metal_sim_program {\n#line 1\n";
  result.text += source.Print();
  METAL_SIM_RETURN_IF_ERROR(Select(kernels, &result.kernels));
  result.text += runs ? ModuleText(result.kernels, result.constants) : UsesText(result.kernels);
  return result;
}

std::string NoKernelText(const std::string& name, const std::vector<std::string>& known) {
  return fmt::format("kernel: no '{}'; there are: {}", name, fmt::join(known, ", "));
}

}  // namespace metal_sim
