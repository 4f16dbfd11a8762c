// Kernel parameters: splitting the list, naming, binding.
#include "metal_sim/msl_parameters.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace metal_sim {
namespace {

/// Metal's limits: buffers 0 to 30, threadgroup memory 0 to 30.
constexpr int kMaxIndex = 30;

struct InputName {
  std::string_view attribute;
  Source source;
};

constexpr InputName kInputs[] = {
    {"thread_position_in_grid", Source::kThreadPositionInGrid},
    {"thread_position_in_threadgroup", Source::kThreadPositionInThreadgroup},
    {"threadgroup_position_in_grid", Source::kThreadgroupPositionInGrid},
    {"thread_index_in_threadgroup", Source::kThreadIndexInThreadgroup},
    {"thread_index_in_simdgroup", Source::kThreadIndexInSimdgroup},
    {"simdgroup_index_in_threadgroup", Source::kSimdgroupIndexInThreadgroup},
    {"thread_index_in_quadgroup", Source::kThreadIndexInQuadgroup},
    {"quadgroup_index_in_threadgroup", Source::kQuadgroupIndexInThreadgroup},
    {"threads_per_threadgroup", Source::kThreadsPerThreadgroup},
    {"threads_per_grid", Source::kThreadsPerGrid},
    {"threadgroups_per_grid", Source::kThreadgroupsPerGrid},
    {"simdgroups_per_threadgroup", Source::kSimdgroupsPerThreadgroup},
    {"threads_per_simdgroup", Source::kThreadsPerSimdgroup},
    {"thread_execution_width", Source::kThreadsPerSimdgroup},
    {"dispatch_threads_per_threadgroup", Source::kDispatchThreadsPerThreadgroup},
};

/// Words that may stand around a type without being one.
constexpr std::string_view kQualifiers[] = {"const",  "volatile",    "device", "constant",
                                            "thread", "threadgroup", "struct", "unsigned",
                                            "signed", "typename"};

struct Parameter {
  TokenRange tokens;
  KernelArgument argument;
  bool bound;  // False for a buffer that needs an index.
};

/// Splits the list between `open` and its partner at its own commas.
std::vector<TokenRange> SplitParameters(const MslSource& source, size_t open) {
  const size_t close = source.Partner(open);
  std::vector<TokenRange> ranges;
  size_t first = open + 1;
  for (size_t i = first; i < close; i = source.Partner(i) + 1) {
    if (source.Is(i, "<") && source.ClosingAngle(i, close) != kNoToken) {
      i = source.ClosingAngle(i, close);
    }
    if (!source.Is(i, ",")) continue;
    ranges.push_back({first, i});
    first = i + 1;
  }
  const bool nothing = first == close || (close == open + 2 && source.Is(first, "void"));
  if (!nothing || !ranges.empty()) ranges.push_back({first, close});
  return ranges;
}

bool IsQualifier(std::string_view word) {
  return std::find(std::begin(kQualifiers), std::end(kQualifiers), word) != std::end(kQualifiers);
}

/// The declared name, empty if there is none: the last word, if a type stands in front of it. The
/// name of a pointer or reference to an array is inside parentheses.
std::string NameOf(const MslSource& source, TokenRange tokens) {
  bool typed = false;
  std::string_view name;
  for (size_t i = tokens.first; i < tokens.end; ++i) {
    if (source.Is(i, "=") || source.Is(i, "[")) break;
    if (source.Is(i, "<") && source.ClosingAngle(i, tokens.end) != kNoToken) {
      i = source.ClosingAngle(i, tokens.end);
    } else if (source.IsIdentifier(i) && !IsQualifier(source.Text(i))) {
      if (typed && !source.Is(i - 1, "::")) name = source.Text(i);
      typed = true;
    }
  }
  return std::string(name);
}

bool Mentions(const MslSource& source, TokenRange tokens, std::string_view word) {
  for (size_t i = tokens.first; i < tokens.end; ++i) {
    if (source.Is(i, word)) return true;
  }
  return false;
}

/// Whether it is a pointer, a reference or an array (which is a pointer) in memory that buffers
/// hold.
bool IsBuffer(const MslSource& source, TokenRange tokens) {
  const bool pointer = Mentions(source, tokens, "*") || Mentions(source, tokens, "&") ||
                       Mentions(source, tokens, "[");
  return pointer && (Mentions(source, tokens, "device") || Mentions(source, tokens, "constant"));
}

std::optional<Source> InputOf(std::string_view attribute) {
  for (const InputName& input : kInputs) {
    if (input.attribute == attribute) return input.source;
  }
  return std::nullopt;
}

Status ErrorAt(const Attribute& attribute, std::string_view message) {
  return Status(Code::kInvalidArgument,
                fmt::format("{}: {}", LocationOf(attribute.where), message));
}

/// The name of the parameter in messages.
std::string Described(const MslSource& source, const Parameter& parameter) {
  if (!parameter.argument.name.empty()) return fmt::format("'{}'", parameter.argument.name);
  return fmt::format("'{}'", source.Spell(parameter.tokens.first, parameter.tokens.end));
}

/// Reads one attribute into the parameter.
Status Bind(const MslSource& source, const Attribute& attribute, Parameter& parameter) {
  const std::string& name = attribute.name;
  if (name == "maybe_unused") return Status();
  if (name == "function_constant") {
    for (const Token& token : attribute.arguments) parameter.argument.condition += token.text;
    return Status();
  }
  std::optional<Source> found = InputOf(name);
  int index = 0;
  if (name == "buffer" || name == "threadgroup") {
    found = name == "buffer" ? Source::kBuffer : Source::kThreadgroupMemory;
    const std::optional<int> number = IntegerOf(attribute.arguments);
    if (!number || *number > kMaxIndex) {
      return ErrorAt(attribute, fmt::format("the index of [[{}]] of {} is no number from 0 to {}",
                                            name, Described(source, parameter), kMaxIndex));
    }
    index = *number;
  }
  if (!found) {
    return ErrorAt(attribute, fmt::format("the simulator does not know [[{}]], an attribute of {}",
                                          name, Described(source, parameter)));
  }
  if (parameter.bound) {
    return ErrorAt(attribute, fmt::format("[[{}]] is a second binding of {}", name,
                                          Described(source, parameter)));
  }
  parameter.bound = true;
  parameter.argument.source = *found;
  parameter.argument.index = index;
  return Status();
}

Result<Parameter> ReadParameter(const MslSource& source, TokenRange tokens) {
  Parameter parameter = {
      tokens,
      {Source::kBuffer, 0, NameOf(source, tokens), source.Spell(tokens.first, tokens.end)},
      false};
  // Attributes after the last token stand in front of the ',' or ')'.
  for (const Attribute& attribute : source.Attributes(tokens.first, tokens.end)) {
    METAL_SIM_RETURN_IF_ERROR(Bind(source, attribute, parameter));
  }
  if (!parameter.bound && !IsBuffer(source, tokens)) {
    return source.Error(tokens.first, fmt::format("the kernel's parameter {} has no binding",
                                                  Described(source, parameter)));
  }
  return parameter;
}

bool SamePlace(const KernelArgument& a, const KernelArgument& b) {
  const bool indexed = a.source == Source::kBuffer || a.source == Source::kThreadgroupMemory;
  return indexed && a.source == b.source && a.index == b.index;
}

/// Two parameters may share an index only if function constants choose between them.
Status CheckIndices(const MslSource& source, std::span<const Parameter> parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const Parameter& a = parameters[j];
      const Parameter& b = parameters[i];
      const bool clash = a.bound && b.bound && SamePlace(a.argument, b.argument);
      if (!clash || (!a.argument.condition.empty() && !b.argument.condition.empty())) continue;
      return source.Error(b.tokens.first,
                          fmt::format("{} and {} have the same index {}", Described(source, a),
                                      Described(source, b), b.argument.index));
    }
  }
  return Status();
}

/// Gives the lowest free index to each buffer without one.
Status AssignIndices(const MslSource& source, std::span<Parameter> parameters) {
  bool used[kMaxIndex + 1] = {};
  for (const Parameter& parameter : parameters) {
    const bool buffer = parameter.bound && parameter.argument.source == Source::kBuffer;
    if (buffer) used[parameter.argument.index] = true;
  }
  for (Parameter& parameter : parameters) {
    if (parameter.bound) continue;
    const auto* const free = std::find(std::begin(used), std::end(used), false);
    if (free == std::end(used)) {
      return source.Error(parameter.tokens.first,
                          fmt::format("no index is left for the buffer {}; Metal has {}",
                                      Described(source, parameter), kMaxIndex + 1));
    }
    parameter.argument.index = static_cast<int>(free - std::begin(used));
    used[parameter.argument.index] = true;
  }
  return Status();
}

}  // namespace

Result<std::vector<KernelArgument>> ReadParameters(const MslSource& source, size_t open) {
  std::vector<Parameter> parameters;
  for (const TokenRange tokens : SplitParameters(source, open)) {
    METAL_SIM_ASSIGN_OR_RETURN(Parameter parameter, ReadParameter(source, tokens));
    parameters.push_back(std::move(parameter));
  }
  METAL_SIM_RETURN_IF_ERROR(CheckIndices(source, parameters));
  METAL_SIM_RETURN_IF_ERROR(AssignIndices(source, parameters));
  std::vector<KernelArgument> arguments;
  arguments.reserve(parameters.size());
  for (Parameter& parameter : parameters) arguments.push_back(std::move(parameter.argument));
  return arguments;
}

}  // namespace metal_sim
