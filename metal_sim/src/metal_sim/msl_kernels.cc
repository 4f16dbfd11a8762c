// Kernels are collected in two passes, so that an instantiation may stand in front of the function
// template's body.
#include "metal_sim/msl_kernels.h"

#include <fmt/core.h>

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "metal_sim/msl_parameters.h"

namespace metal_sim {
namespace {

/// Words that may stand in front of a kernel's return type.
bool IsKernelSpecifier(const MslSource& source, size_t index) {
  return source.Is(index, "kernel") || source.Is(index, "static") || source.Is(index, "inline") ||
         source.Is(index, "extern") || source.Is(index, "constexpr");
}

/// Specifiers that take parentheses.
bool SpecifierTakesParentheses(const MslSource& source, size_t index) {
  return source.Is(index, "__attribute__") || source.Is(index, "alignas") ||
         source.Is(index, "decltype");
}

/// The parenthesis that opens the parameters of the function declared in [head, stop), kNoToken if
/// no function is.
size_t ParametersOf(const MslSource& source, size_t head, size_t stop) {
  for (size_t i = head; i < stop; i = source.Partner(i) + 1) {
    if (source.Is(i, "=")) return kNoToken;
    if (source.Is(i, "(") && !SpecifierTakesParentheses(source, i - 1)) return i;
    const size_t angle = source.Is(i, "<") ? source.ClosingAngle(i, stop) : kNoToken;
    if (angle != kNoToken) i = angle;
  }
  return kNoToken;
}

const Attribute* FindAttribute(std::span<const Attribute> attributes, std::string_view name) {
  for (const Attribute& attribute : attributes) {
    if (attribute.name == name) return &attribute;
  }
  return nullptr;
}

/// The string of [[host_name("a" "b")]].
Result<std::string> HostName(const Attribute& attribute) {
  std::string name;
  bool strings = true;
  for (const Token& token : attribute.arguments) {
    const std::string_view text = token.text;
    const bool parenthesis = text == "(" || text == ")";
    const bool plain = token.kind == TokenKind::kString && text.front() == '"' &&
                       text.find('\\') == std::string_view::npos;
    strings = strings && (plain || parenthesis);
    if (plain) name += text.substr(1, text.size() - 2);
  }
  if (strings && !name.empty()) return name;
  return Status(Code::kInvalidArgument,
                LocationOf(attribute.where) + ": host_name needs one plain string");
}

class KernelCollector {
 public:
  explicit KernelCollector(MslSource& source) : source_(source) {}

  Result<std::vector<KernelEntry>> Run(std::span<const Declaration> declarations) {
    METAL_SIM_RETURN_IF_ERROR(CheckPlaces());
    for (const Declaration& declaration : declarations) {
      if (IsInstantiation(declaration)) continue;
      METAL_SIM_RETURN_IF_ERROR(ReadFunction(declaration));
    }
    for (const Declaration& declaration : declarations) {
      if (!IsInstantiation(declaration)) continue;
      METAL_SIM_RETURN_IF_ERROR(ReadInstantiation(declaration));
    }
    return std::move(entries_);
  }

 private:
  struct Function {
    std::vector<KernelArgument> arguments;
    std::string location;
    bool is_template;
    int max_threads;
  };

  /// A kernel elsewhere than at namespace scope would not be among the declarations.
  Status CheckPlaces() const {
    for (size_t i = 0; i < source_.size(); ++i) {
      if (source_.Is(i, "kernel")) METAL_SIM_RETURN_IF_ERROR(CheckPlace(i));
    }
    for (const Attribute& attribute : source_.Attributes(0, source_.size())) {
      if (attribute.name == "kernel") METAL_SIM_RETURN_IF_ERROR(CheckPlace(attribute.before));
    }
    return Status();
  }

  Status CheckPlace(size_t index) const {
    const size_t around = source_.Enclosing(index);
    const bool in_namespace =
        around == kNoToken ||
        (source_.Is(around, "{") && KindOfBrace(source_, around) == BraceKind::kNamespace);
    if (in_namespace) return Status();
    return source_.Error(index, "a kernel is a function at namespace scope");
  }

  /// `template` without `<`.
  bool IsInstantiation(const Declaration& declaration) const {
    const bool external = source_.Is(declaration.first, "extern");
    return source_.Is(declaration.first + (external ? 1 : 0), "template") &&
           !declaration.is_template();
  }

  /// `kernel` or [[kernel]] in front of `end`.
  bool IsKernel(const Declaration& declaration, size_t end) const {
    for (size_t i = declaration.head; i < end; i = source_.Partner(i) + 1) {
      if (source_.Is(i, "kernel")) return true;
    }
    return FindAttribute(source_.Attributes(declaration.first, end), "kernel") != nullptr;
  }

  Status ReadFunction(const Declaration& declaration) {
    const size_t open = ParametersOf(source_, declaration.head, declaration.stop);
    if (open == kNoToken) {
      if (!IsKernel(declaration, declaration.stop)) return Status();
      return source_.Error(declaration.head, "'kernel' stands in front of what is no function");
    }
    if (!IsKernel(declaration, open) || !declaration.has_body) return Status();
    const size_t name = open - 1;
    if (source_.Is(name, ">")) {
      return source_.Error(name, "a kernel template cannot have explicit specialisations");
    }
    METAL_SIM_RETURN_IF_ERROR(CheckReturnType(declaration.head, name));
    METAL_SIM_ASSIGN_OR_RETURN(std::vector<KernelArgument> arguments,
                               ReadParameters(source_, open));
    return AddFunction(declaration, name, std::move(arguments));
  }

  Status CheckReturnType(size_t head, size_t name) const {
    while (IsKernelSpecifier(source_, head) || source_.Is(head, "__attribute__")) {
      head = source_.Is(head, "__attribute__") ? source_.Partner(head + 1) + 1 : head + 1;
    }
    if (head + 1 == name && source_.Is(head, "void") && source_.IsIdentifier(name)) {
      return Status();
    }
    return source_.Error(name, fmt::format("kernel '{}' returns '{}', not void", source_.Text(name),
                                           source_.Spell(head, name)));
  }

  Status AddFunction(const Declaration& declaration, size_t name_index,
                     std::vector<KernelArgument> arguments) {
    std::string name = declaration.scope;
    name += source_.Text(name_index);
    const Attribute* const host =
        FindAttribute(source_.Attributes(declaration.first, name_index), "host_name");
    const Attribute* const most = FindAttribute(source_.Attributes(declaration.first, name_index),
                                                "max_total_threads_per_threadgroup");
    const int max_threads = most == nullptr ? 0 : IntegerOf(most->arguments).value_or(0);
    const Function function = {std::move(arguments), source_.Location(name_index),
                               declaration.is_template(), max_threads};
    const auto [other, added] = functions_.emplace(name, function);
    if (!added) {
      return source_.Error(name_index,
                           fmt::format("kernel '{}' is defined a second time; it is at {}", name,
                                       other->second.location));
    }
    if (function.is_template) {
      if (host == nullptr) return Status();
      return source_.Error(name_index, fmt::format("kernel template '{}' has a host_name; only its "
                                                   "instantiations can have one",
                                                   name));
    }
    return AddEntry({name, name, function.arguments, function.location, max_threads}, host,
                    name_index);
  }

  /// Gives the entry its host_name, if there is one, and sees that no other has the name.
  Status AddEntry(KernelEntry entry, const Attribute* host, size_t where) {
    if (host != nullptr) {
      METAL_SIM_ASSIGN_OR_RETURN(entry.name, HostName(*host));
    }
    const auto [other, added] = names_.emplace(entry.name, entry.location);
    if (!added) {
      return source_.Error(where, fmt::format("a second kernel is named '{}'; the other is at {}",
                                              entry.name, other->second));
    }
    entries_.push_back(std::move(entry));
    return Status();
  }

  /// `template [[host_name("x")]] kernel void f<half, 4>(device half*);`, or with
  /// `decltype(f<half, 4>) f<half, 4>;`.
  Status ReadInstantiation(const Declaration& declaration) {
    const size_t stop = declaration.stop;
    const size_t target_end = source_.Is(stop - 1, ")") ? source_.Partner(stop - 1) : stop;
    const std::span<const Attribute> attributes = source_.Attributes(declaration.first, stop);
    const Attribute* const host = FindAttribute(attributes, "host_name");
    const bool marked = host != nullptr || IsKernel(declaration, target_end);
    size_t angle = LastAngle(declaration.head, target_end);
    // Else all template arguments follow from the parameters.
    if (angle == kNoToken && target_end < stop) angle = target_end;
    const size_t first = angle == kNoToken ? kNoToken : NameStart(angle);
    const std::string name =
        angle == kNoToken ? "" : Resolve(declaration.scope, source_.Spell(first, angle));
    if (name.empty() && !marked) return Status();  // An instance of a function that is no kernel.
    if (name.empty() || !source_.Is(stop, ";")) {
      return source_.Error(declaration.first,
                           fmt::format("'{}' instantiates no kernel template",
                                       source_.Spell(declaration.first, target_end)));
    }
    const std::string expression = angle == target_end ? Deduced(declaration, first, target_end)
                                                       : name + source_.Spell(angle, target_end);
    const Function& function = functions_.at(name);
    METAL_SIM_RETURN_IF_ERROR(AddEntry({expression, expression, function.arguments,
                                        source_.Location(declaration.first), function.max_threads},
                                       host, declaration.first));
    if (angle != target_end) source_.Blank(declaration.first, declaration.end);
    return Status();
  }

  /// Makes the instantiation `template void f(device T*, ...);`, its name at `first` and its
  /// parameters at `open`, a reference to the function that they choose. Returns how to name it.
  std::string Deduced(const Declaration& declaration, size_t first, size_t open) {
    const std::string instance = fmt::format("metal_sim_instance_{}", deduced_++);
    const std::string text =
        fmt::format("static constexpr auto& {} = static_cast<void (&){}>({})", instance,
                    source_.Spell(open, declaration.stop), source_.Spell(first, open));
    source_.Blank(declaration.first, declaration.stop);
    source_.Replace(declaration.first, text);
    return declaration.scope + instance;
  }

  /// The `<` whose `>` is the last token in front of `end`, kNoToken if there is none.
  size_t LastAngle(size_t head, size_t end) const {
    for (size_t i = head; i < end; i = source_.Partner(i) + 1) {
      const size_t close = source_.Is(i, "<") ? source_.ClosingAngle(i, end) : kNoToken;
      if (close == kNoToken) continue;
      if (close + 1 == end) return i;
      i = close;
    }
    return kNoToken;
  }

  /// The start of the qualified name that ends in front of `angle`.
  size_t NameStart(size_t angle) const {
    size_t first = angle - 1;
    while (source_.Is(first - 1, "::") && source_.IsIdentifier(first - 2)) first -= 2;
    return first;
  }

  /// The kernel template that `name` means in `scope`, with its namespaces; empty if none is.
  std::string Resolve(std::string scope, const std::string& name) const {
    while (true) {
      const auto found = functions_.find(scope + name);
      if (found != functions_.end() && found->second.is_template) return found->first;
      if (scope.empty()) return "";
      const size_t parent = scope.rfind("::", scope.size() - 3);
      scope.erase(parent == std::string::npos ? 0 : parent + 2);
    }
  }

  MslSource& source_;
  int deduced_ = 0;
  std::map<std::string, Function> functions_;
  std::map<std::string, std::string> names_;  // Names of entries, and their places.
  std::vector<KernelEntry> entries_;
};

}  // namespace

Result<std::vector<KernelEntry>> CollectKernels(MslSource& source,
                                                std::span<const Declaration> declarations) {
  return KernelCollector(source).Run(declarations);
}

}  // namespace metal_sim
