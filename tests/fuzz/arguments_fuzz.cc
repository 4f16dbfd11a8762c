// Command lines: numbers are either read exactly or refused, sizes beyond any memory are refused
// before allocation, and no line ends in an internal error. Input: the index of a command, then
// arguments, one per line. Commands get a model path that does not exist, `plan` a small model.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/parse_number.h"
#include "bench/gemm.h"
#include "cli/arguments/arguments.h"
#include "cli/arguments/metal_sim_arguments.h"
#include "cli/arguments/product_arguments.h"
#include "cli/command_line.h"
#include "fuzz_target.h"
#include "marlin/recipe.h"
#include "temporary_folder.h"

namespace {

using namespace marlin;

using Lines = std::vector<std::string>;

constexpr size_t kMostArguments = 64;

// Commands that do nothing without a model or another input file.
constexpr const char* kCommands[] = {"quantize",   "inspect",  "plan",       "verify",
                                     "dequantize", "generate", "perplexity", "compare"};

constexpr std::string_view kConfig =
    R"({"model_type":"llama","hidden_size":32,"intermediate_size":64,"num_hidden_layers":1,)"
    R"("num_attention_heads":2,"vocab_size":64})";

/// Whether a file that the argument names would be inside this process's folder.
bool StaysInside(const std::string& argument) {
  if (argument.find("..") != std::string::npos || argument.starts_with('/')) return false;
  for (const char* const root : {"=/", ":/", "@/", "o/"}) {
    if (argument.find(root) != std::string::npos) return false;
  }
  return argument.find('\0') == std::string::npos;
}

/// Parses with options of every kind. Returns false if the parser refuses.
bool Parse(const Lines& arguments, const std::function<void(cli::ArgumentList&)>& declare) {
  CLI::App app;
  cli::ArgumentList list(app);
  declare(list);
  Lines reversed(arguments.rbegin(), arguments.rend());
  try {
    app.parse(reversed);
  } catch (const CLI::ParseError&) {
    return false;
  }
  return true;
}

void CheckNumbers(const std::string& text) {
  std::optional<int64_t> integer;
  constexpr WholeRange kAny{INT64_MIN, INT64_MAX};
  const auto whole = [&](auto& list) { list.Option("--n", &integer, kAny, "N", ""); };
  if (Parse({"--n=" + text}, whole)) {
    MARLIN_FUZZ_CHECK(integer.has_value() && !text.empty());
    const bool decimal =
        text.find_first_not_of("0123456789", text[0] == '-' ? 1 : 0) == std::string::npos;
    int64_t exact = 0;
    if (decimal && ParseNumber(text, &exact)) {
      MARLIN_FUZZ_CHECK(exact == *integer || text.starts_with('0') || text.starts_with("-0"));
    } else {
      MARLIN_FUZZ_CHECK(!decimal);  // Out of range: must be refused, not clamped.
    }
  }
  std::optional<double> real;
  constexpr double kLargest = std::numeric_limits<double>::max();
  const auto any = [&](auto& list) { list.Option("--x", &real, {-kLargest, kLargest}, "X", ""); };
  if (Parse({"--x=" + text}, any)) {
    MARLIN_FUZZ_CHECK(real.has_value() && !text.empty());
    const bool digits = text.find_first_of("0123456789") != std::string::npos;
    MARLIN_FUZZ_CHECK(std::isfinite(*real) || !digits);
  }
}

void CheckNames(const std::string& text) {
  const auto choice = ParseFormatChoice(text);
  if (choice.ok()) {
    const auto again = ParseFormatChoice(choice->ToString());
    MARLIN_FUZZ_CHECK(again.ok() && *again == *choice);
    const auto recipe = MixedPrecisionConfig::FromNameOrFile("uniform:" + text);
    MARLIN_FUZZ_CHECK(recipe.ok());
  } else {
    CheckError(choice.status());
  }
  for (const auto& scalar : {cli::MetalScalar::kFloat, cli::MetalScalar::kHalf,
                             cli::MetalScalar::kInt, cli::MetalScalar::kUlong}) {
    const auto bytes = cli::EncodeMetalScalar(scalar, text);
    if (!bytes.ok()) continue;
    MARLIN_FUZZ_CHECK(static_cast<int64_t>(bytes->size()) == cli::MetalScalarBytes(scalar));
    const auto again =
        cli::EncodeMetalScalar(scalar, cli::FormatMetalScalar(scalar, bytes->data()));
    MARLIN_FUZZ_CHECK(!again.ok() || *again == *bytes);
  }
}

/// Products whose operands no memory holds are refused before any of it is asked for.
void CheckProduct(bench::BenchCase bench) {
  constexpr __int128 kMostElements = __int128{1} << 44;  // More bytes than any machine has.
  const __int128 m = bench.shape.m;
  const __int128 n = bench.shape.n;
  const __int128 k = bench.shape.k;
  const bool absurd = std::max({m * n, m * k, n * k * bench.spec.experts}) > kMostElements;
  for (const char* const op : {"gemm", "dequantize"}) {
    bench.op = op;
    const Status fits = cli::CheckCaseFits(bench);
    MARLIN_FUZZ_CHECK(!absurd || !fits.ok());
    if (!fits.ok()) CheckError(fits);
  }
}

void CheckProducts(const Lines& lines) {
  cli::ProductArguments products;
  if (!Parse(lines, [&](auto& list) { products.Declare(list); })) return;
  const Status read = products.Read();
  if (!read.ok()) CheckError(read);
}

void CheckShape(const std::string& text) {
  const auto shape = cli::ParseShape(text);
  if (!shape.ok()) return CheckError(shape.status());
  MARLIN_FUZZ_CHECK(shape->m > 0 && shape->n > 0 && shape->k > 0);
  MARLIN_FUZZ_CHECK(text.size() >= 5 && text.find_first_not_of("0123456789,") == text.npos);
  cli::ProductArguments products;
  MARLIN_FUZZ_CHECK(Parse({"--copies=1"}, [&](auto& list) { products.Declare(list); }) &&
                    products.Read().ok());
  CheckProduct(products.MakeCase(Format::kFp4E2M1, *shape, 1));
}

void RunCommand(const char* command, const Lines& lines) {
  Lines arguments = {"metal-marlin", command, "missing"};
  if (std::string_view(command) == "plan") {
    arguments.back() = "config.json";
    arguments.emplace_back("--bandwidth=1");
  }
  arguments.insert(arguments.end(), lines.begin(), lines.end());
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  const int code = cli::RunCommandLine(static_cast<int>(arguments.size()), pointers.data());
  MARLIN_FUZZ_CHECK(code >= 0 && code <= 3);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const TemporaryFolder folder;
  if (size < 1) return 0;
  const char* const command = kCommands[data[0] % std::size(kCommands)];
  std::string_view rest = TextOf(data + 1, size - 1);
  Lines lines;
  while (!rest.empty() && lines.size() < kMostArguments) {
    lines.emplace_back(TakePart(&rest, "\n"));
    if (!StaysInside(lines.back())) lines.pop_back();
  }
  for (const std::string& line : lines) {
    CheckNumbers(line);
    CheckNames(line);
    CheckShape(line);
  }
  CheckProducts(lines);
  folder.Write("config.json", kConfig);
  std::filesystem::current_path(folder.Path(""));
  RunCommand(command, lines);
  return 0;
}
