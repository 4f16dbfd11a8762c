#include "metal_sim/slot_count.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace metal_sim {
namespace {

constexpr std::string_view kUninstrumented = "disable_sanitizer_instrumentation";
/// The widest load or store of a thread.
constexpr int64_t kVectorBytes = 16;

/// Removes and returns the text up to a separator, and the separator.
std::string_view TakeUntil(std::string_view* text, std::string_view separator) {
  const size_t at = std::min(text->find(separator), text->size());
  const std::string_view part = text->substr(0, at);
  text->remove_prefix(std::min(at + separator.size(), text->size()));
  return part;
}

std::string_view Trim(std::string_view text) {
  const size_t first = text.find_first_not_of(' ');
  if (first == text.npos) return {};
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

std::vector<std::string_view> Lines(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) lines.push_back(TakeUntil(&text, "\n"));
  return lines;
}

/// An instruction: `%12 = shl i32 %7, 3` is {"%12", "shl", "i32 %7, 3"}.
struct Instruction {
  std::string_view result;
  std::string_view name;
  std::string_view operands;
};

Instruction ParseInstruction(std::string_view line) {
  Instruction instruction;
  line = Trim(line);
  const size_t equals = line.find(" = ");
  if (line.starts_with('%') && equals != line.npos) {
    instruction.result = TakeUntil(&line, " = ");
  }
  instruction.name = TakeUntil(&line, " ");
  if (instruction.name.ends_with("tail")) {  // The kind of a call.
    instruction.name = TakeUntil(&line, " ");
  }
  // Metadata names no values.
  instruction.operands = line.substr(0, line.find(", !"));
  return instruction;
}

/// The names of values in operands.
std::vector<std::string_view> ValuesOf(std::string_view operands) {
  std::vector<std::string_view> values;
  constexpr std::string_view kEnds = " ,)]}";
  for (size_t at = operands.find('%'); at != operands.npos; at = operands.find('%', at)) {
    const size_t end = std::min(operands.find_first_of(kEnds, at), operands.size());
    values.push_back(operands.substr(at, end - at));
    at = end;
  }
  return values;
}

std::optional<int64_t> ConstantOf(std::string_view text) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
  return value;
}

/// The last operand, where it is a number: the distance of a shift, the offset of an address.
std::optional<int64_t> LastConstant(std::string_view operands) {
  const size_t space = operands.find_last_of(' ');
  return ConstantOf(operands.substr(space == operands.npos ? 0 : space + 1));
}

/// Facts about a function's values.
class Values {
 public:
  void Add(const Instruction& instruction) {
    for (const std::string_view used : ValuesOf(instruction.operands)) {
      if (instruction.name != "trunc") beyond_trunc_.insert(used);
    }
    if (instruction.result.empty()) return;
    if (instruction.name == "sext" || instruction.name == "zext") {
      extended_.insert(instruction.result);
    } else if (instruction.name == "getelementptr") {
      AddAddress(instruction);
    }
  }

  /// Whether a value is used as nothing but a narrower one.
  bool OnlyTruncated(std::string_view value) const { return !beyond_trunc_.contains(value); }
  /// Whether the hardware adds the index of an address, which is 32 bits wide.
  bool HasNarrowIndex(std::string_view operands) const {
    const std::vector<std::string_view> values = ValuesOf(operands);
    return !values.empty() && extended_.contains(values.back());
  }
  /// An address as a value and the bytes beyond it.
  std::pair<std::string_view, int64_t> PlaceOf(std::string_view address) const {
    int64_t offset = 0;
    for (auto at = addresses_.find(address); at != addresses_.end();
         at = addresses_.find(address)) {
      offset += at->second.second;
      address = at->second.first;
    }
    return {address, offset};
  }

 private:
  void AddAddress(const Instruction& instruction) {
    const std::vector<std::string_view> values = ValuesOf(instruction.operands);
    const std::optional<int64_t> offset = LastConstant(instruction.operands);
    const bool of_bytes = instruction.operands.find("i8, ptr %") != std::string_view::npos;
    if (offset && of_bytes && values.size() == 1) {
      addresses_[instruction.result] = {values[0], *offset};
    }
  }

  std::set<std::string_view> beyond_trunc_;
  std::set<std::string_view> extended_;
  std::map<std::string_view, std::pair<std::string_view, int64_t>> addresses_;
};

bool IsOneOf(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool IsWide(const Instruction& instruction) {
  return instruction.operands.find("i64 ") != std::string_view::npos;
}

int64_t CostOfShift(const Instruction& instruction, const Values& values) {
  const std::optional<int64_t> distance = LastConstant(instruction.operands);
  const bool names_part = instruction.name == "lshr" && distance && *distance % 16 == 0 &&
                          values.OnlyTruncated(instruction.result);
  if (names_part) return 0;
  if (IsWide(instruction)) return 16;
  if (distance == 16) return 1;
  return instruction.name == "shl" && distance == 1 ? 1 : 4;
}

int64_t CostOfCall(const Instruction& instruction) {
  const std::string_view operands = instruction.operands;
  const auto calls = [&](std::string_view name) { return operands.find(name) != operands.npos; };
  if (calls("@llvm.lifetime.") || calls("@llvm.assume") || calls("@llvm.experimental.noalias")) {
    return 0;
  }
  if (calls("@llvm.fshl.") || calls("@llvm.fshr.") || calls(".sat.")) return 4;
  return calls("@llvm.sqrt.") ? 8 : 1;
}

/// The cost of one instruction, except of loads and stores.
int64_t CostOf(const Instruction& instruction, const Values& values) {
  const std::string_view name = instruction.name;
  if (IsOneOf(name, {"phi", "trunc", "zext", "sext", "bitcast", "fpext", "freeze", "ret", "alloca",
                     "extractvalue", "insertvalue", "unreachable", "ptrtoint", "inttoptr"})) {
    return 0;
  }
  if (name == "br") return instruction.operands.starts_with("label") ? 0 : 1;
  if (name == "getelementptr") {
    const bool moves = ValuesOf(instruction.operands).size() > 1;
    return moves && !values.HasNarrowIndex(instruction.operands) ? 4 : 0;
  }
  if (IsOneOf(name, {"shl", "lshr", "ashr"})) return CostOfShift(instruction, values);
  if (name == "mul") return IsWide(instruction) ? 16 : 4;
  if (IsOneOf(name, {"add", "sub"})) return IsWide(instruction) ? 4 : 1;
  if (IsOneOf(name, {"udiv", "sdiv", "urem", "srem"})) return 32;
  if (IsOneOf(name, {"sitofp", "uitofp", "fptosi", "fptoui"})) return 4;
  if (IsOneOf(name, {"fdiv", "frem"})) return 8;
  return name == "call" ? CostOfCall(instruction) : 1;
}

/// A basic block while its lines are read.
class Block {
 public:
  int64_t CostOfNext(const Instruction& instruction, const Values& values) {
    const bool loads = instruction.name == "load";
    if (!loads && instruction.name != "store") return CostOf(instruction, values);
    const std::vector<std::string_view> used = ValuesOf(instruction.operands);
    if (used.empty()) return 1;
    const auto [base, offset] = values.PlaceOf(used.back());
    return vectors_.insert({loads, base, offset / kVectorBytes}).second ? 1 : 0;
  }

 private:
  struct Vector {
    bool loaded;
    std::string_view base;
    int64_t number;
    auto operator<=>(const Vector&) const = default;
  };
  std::set<Vector> vectors_;
};

/// Reads modules line by line.
class Counting {
 public:
  explicit Counting(std::string_view module) : lines_(Lines(module)) {
    for (const std::string_view line : lines_) {
      if (!line.starts_with("attributes #") || line.find(kUninstrumented) == line.npos) continue;
      const std::string_view rest = line.substr(line.find('#'));
      uninstrumented_.insert(rest.substr(0, rest.find(' ')));
    }
  }

  SlotModule Run() {
    for (size_t i = 0; i < lines_.size(); ++i) {
      Append(lines_[i]);
      if (!lines_[i].starts_with("define ") || IsUninstrumented(lines_[i])) continue;
      size_t end = i;
      while (lines_[end] != "}") ++end;
      AddFunction(i + 1, end);
      i = end - 1;
    }
    const size_t count = made_.costs.size();
    made_.text += fmt::format(
        "@metal_sim_slot_blocks = constant i64 {0}\n"
        "@metal_sim_slot_runs = global [{0} x i64] zeroinitializer\n"
        "@metal_sim_slot_costs = constant [{0} x i64] [",
        count);
    for (size_t i = 0; i < count; ++i) {
      made_.text += fmt::format("{}i64 {}", i == 0 ? "" : ", ", made_.costs[i]);
    }
    made_.text += "]\n";
    return std::move(made_);
  }

 private:
  bool IsUninstrumented(std::string_view definition) const {
    // After the parameters: "... local_unnamed_addr #6 comdat {".
    for (size_t at = definition.find(" #"); at != definition.npos;
         at = definition.find(" #", at + 1)) {
      const std::string_view rest = definition.substr(at + 1);
      if (uninstrumented_.contains(rest.substr(0, rest.find(' ')))) return true;
    }
    return false;
  }

  void Append(std::string_view line) { made_.text.append(line).push_back('\n'); }

  static bool IsInstruction(std::string_view line) {
    // Cases of a switch are deeper.
    return line.starts_with("  ") && !line.starts_with("   ") && !line.starts_with("  ]");
  }

  void AddFunction(size_t begin, size_t end) {
    Values values;
    for (size_t i = begin; i < end; ++i) {
      if (IsInstruction(lines_[i])) values.Add(ParseInstruction(lines_[i]));
    }
    Block block;
    bool counted = false;
    for (size_t i = begin; i < end; ++i) {
      const std::string_view line = lines_[i];
      if (IsInstruction(line)) {
        const Instruction instruction = ParseInstruction(line);
        if (!counted && instruction.name != "phi") {
          AddCounter();
          block = Block();
          counted = true;
        }
        if (counted) made_.costs.back() += block.CostOfNext(instruction, values);
      } else if (!line.empty() && line[0] != ' ') {
        counted = false;  // A label.
      }
      Append(line);
    }
  }

  void AddCounter() {
    const size_t i = made_.costs.size();
    made_.text += fmt::format(
        "  %metal_sim_run.{0} = load i64, ptr getelementptr (i64, ptr @metal_sim_slot_runs, i64 "
        "{0})\n"
        "  %metal_sim_next.{0} = add i64 %metal_sim_run.{0}, 1\n"
        "  store i64 %metal_sim_next.{0}, ptr getelementptr (i64, ptr @metal_sim_slot_runs, i64 "
        "{0})\n",
        i);
    made_.costs.push_back(0);
  }

  const std::vector<std::string_view> lines_;
  std::set<std::string_view> uninstrumented_;
  SlotModule made_;
};

}  // namespace

SlotModule CountBlocks(std::string_view module) { return Counting(module).Run(); }

int64_t SlotVariables::Take() const {
  int64_t slots = 0;
  for (int64_t i = 0; blocks != nullptr && i < *blocks; ++i) {
    slots += costs[i] * std::exchange(runs[i], 0);
  }
  return slots;
}

}  // namespace metal_sim
