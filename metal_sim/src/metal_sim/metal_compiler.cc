#include "metal_sim/metal_compiler.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "metal_sim/shim_files.h"

namespace metal_sim {
namespace {

namespace fs = std::filesystem;

constexpr int kOldestClang = 19;
/// Below the folder of a program; as the shim's own #include lines have it.
constexpr const char* kShimFolder = "metal_sim/shim";

/// The first number in "... clang version 19.1.7 (...)"; 0 where there is none.
int ClangVersion(const std::string& text) {
  constexpr std::string_view kBefore = "clang version ";
  const size_t at = text.find(kBefore);
  int version = 0;
  if (at != std::string::npos) {
    const char* first = text.data() + at + kBefore.size();
    std::from_chars(first, text.data() + text.size(), version);
  }
  return version;
}

struct Clang {
  std::string name;
  std::string version;
};

/// Older compilers know neither bfloat arithmetic nor single-precision literals in C++.
Result<Clang> FindClang(const std::string& named) {
  std::vector<std::string> names = {"clang++-19", "clang++-20", "clang++-21", "clang++-22",
                                    "clang++"};
  const char* const variable = std::getenv("METAL_SIM_CLANG");
  if (!named.empty()) {
    names = {named};
  } else if (variable != nullptr && *variable != '\0') {
    names = {variable};
  }
  for (const std::string& name : names) {
    Result<ChildOutput> said = RunChild({name, "--version"});
    if (said.ok() && said->exit_code == 0 && ClangVersion(said->out) >= kOldestClang) {
      return Clang{name, std::move(said->out)};
    }
  }
  return Status(Code::kUnsupported,
                fmt::format("metal-sim: needs clang++ {} or newer; found none as {} "
                            "(METAL_SIM_CLANG may name one)",
                            kOldestClang, fmt::join(names, ", ")));
}

/// Blanks the pragmas that unroll loops: they keep arrays in a GPU's registers, but here only make
/// more code to instrument; and macros of their arguments are left in a text without macros.
std::string WithoutUnrolling(std::string text) {
  constexpr std::string_view kPragma = "#pragma ";
  for (size_t at = text.find(kPragma); at != text.npos; at = text.find(kPragma, at + 1)) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = std::string_view(text).substr(at, end - at);
    const bool first = at == 0 || text[at - 1] == '\n' || text[at - 1] == ' ';
    if (!first || line.find("unroll") == line.npos) continue;
    text.replace(at, line.size(), line.size(), ' ');
  }
  return text;
}

Status WriteText(const fs::path& path, std::string_view text) {
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  std::ofstream file(path, std::ios::binary);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  return file ? Status() : Status(Code::kIo, path.string() + ": cannot be written");
}

}  // namespace

Status MetalCompiler::Check(const std::string& named) { return FindClang(named).status(); }

Result<MetalCompiler> MetalCompiler::Make(const std::string& named) {
  MetalCompiler compiler;
  METAL_SIM_ASSIGN_OR_RETURN(Clang found, FindClang(named));
  compiler.clang_ = std::move(found.name);
  compiler.version_ = std::move(found.version);
  METAL_SIM_ASSIGN_OR_RETURN(compiler.folder_, TemporaryFolder::Make("metal-sim-"));
  for (const ShimFile& file : ShimFiles()) {
    METAL_SIM_RETURN_IF_ERROR(
        compiler.Write(fs::path(kShimFolder) / file.path, file.text).status());
  }
  return compiler;
}

fs::path MetalCompiler::shim() const { return folder() / kShimFolder; }

Result<fs::path> MetalCompiler::Write(const fs::path& name, std::string_view text) const {
  fs::path path = folder() / name;
  METAL_SIM_RETURN_IF_ERROR(WriteText(path, text));
  return path;
}

Result<ChildOutput> MetalCompiler::Run(std::vector<std::string> arguments) const {
  arguments.insert(arguments.begin(), clang_);
  return RunChild(arguments);
}

Result<std::string> MetalCompiler::Preprocess(const fs::path& source,
                                              const CompileOptions& options) const {
  std::error_code missing;
  if (!fs::is_regular_file(source, missing)) {
    return Status(Code::kIo, source.string() + ": no such file");
  }
  std::vector<std::string> arguments = {
      "-E",        "-x",          "c++",           "-std=c++20",
      "-nostdinc", "-nostdinc++", "-D__METAL__=1", "-D__HAVE_BFLOAT__=1"};
  arguments.push_back(VersionFlag(options));
  arguments.push_back("-I" + (shim() / "stubs").string());
  for (const std::string& other : options.include_folders) arguments.push_back("-I" + other);
  for (const std::string& define : options.defines) arguments.push_back("-D" + define);
  arguments.push_back(source.string());
  METAL_SIM_ASSIGN_OR_RETURN(ChildOutput output, Run(std::move(arguments)));
  if (output.exit_code == 0) {
    // Slots count the loops that a GPU runs.
    if (options.count_slots) return std::move(output.out);
    return WithoutUnrolling(std::move(output.out));
  }
  return Status(Code::kInvalidArgument, FirstError(output.error));
}

std::string MetalCompiler::VersionFlag(const CompileOptions& options) {
  return fmt::format("-D__METAL_VERSION__={}", options.msl_version);
}

std::string MetalCompiler::FirstError(const std::string& messages) {
  std::istringstream lines(messages);
  std::string line;
  std::string first;
  while (std::getline(lines, line)) {
    if (line.find("error:") != std::string::npos) return line;
    if (first.empty()) first = line;
  }
  return first.empty() ? "the compiler failed without a message" : first;
}

}  // namespace metal_sim
