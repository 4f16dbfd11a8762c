#include "backends/metal/simulator/metal_program.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>
#include <stdlib.h>

#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>

#include "backends/metal/simulator/child_process.h"
#include "backends/metal/simulator/compile_flags.h"
#include "backends/metal/simulator/launch.h"
#include "backends/metal/simulator/msl_rewriter.h"
#include "backends/metal/simulator/shim_files.h"
#include "base/macros.h"

namespace marlin::metal::simulator {
namespace {

namespace fs = std::filesystem;

constexpr int kOldestClang = 19;
/// Below the folder of a program; as the shim's own #include lines have it.
constexpr const char* kShimFolder = "backends/metal/simulator/shim";

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

/// Older compilers know neither bfloat arithmetic nor single-precision literals in C++.
Result<std::string> FindClang() {
  std::vector<std::string> names = {"clang++-19", "clang++-20", "clang++-21", "clang++-22",
                                    "clang++"};
  if (const char* named = std::getenv("MARLIN_METAL_CLANG")) names = {named};
  for (const std::string& name : names) {
    const Result<ChildOutput> said = RunChild({name, "--version"});
    if (said.ok() && said->exit_code == 0 && ClangVersion(said->out) >= kOldestClang) return name;
  }
  return Status(Code::kUnsupported,
                fmt::format("metal-sim: needs clang++ {} or newer; found none as {} "
                            "(MARLIN_METAL_CLANG may name one)",
                            kOldestClang, fmt::join(names, ", ")));
}

Result<fs::path> MakeTemporaryFolder() {
  std::error_code error;
  std::string pattern = (fs::temp_directory_path(error) / "metal-sim-XXXXXX").string();
  if (error || mkdtemp(pattern.data()) == nullptr) {
    return Status(Code::kIo, pattern + ": cannot be made");
  }
  return fs::path(pattern);
}

Status WriteText(const fs::path& path, std::string_view text) {
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  std::ofstream file(path, std::ios::binary);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  return file ? Status() : Status(Code::kIo, path.string() + ": cannot be written");
}

/// Blanks the pragmas that unroll loops: what keeps arrays in a GPU's registers only makes more code
/// to instrument here.
std::string WithoutUnrolling(std::string text) {
  constexpr std::string_view kPragma = "#pragma clang loop unroll";
  for (size_t at = text.find(kPragma); at != text.npos; at = text.find(kPragma, at)) {
    for (; at < text.size() && text[at] != '\n'; ++at) text[at] = ' ';
  }
  return text;
}

/// What the compiler complains about first.
std::string FirstError(const std::string& messages) {
  std::istringstream lines(messages);
  std::string line;
  std::string first;
  while (std::getline(lines, line)) {
    if (line.find("error:") != std::string::npos) return line;
    if (first.empty()) first = line;
  }
  return first.empty() ? "the compiler failed without a message" : first;
}

/// What a run of the compiler printed.
Result<std::string> RunCompiler(const std::vector<std::string>& arguments) {
  MARLIN_ASSIGN_OR_RETURN(ChildOutput output, RunChild(arguments));
  if (output.exit_code == 0) return std::move(output.out);
  return Status(Code::kInvalidArgument, FirstError(output.error));
}

std::vector<std::string> PreprocessorArguments(const std::string& clang, const fs::path& folder,
                                               const CompileOptions& options) {
  std::vector<std::string> arguments = {clang,
                                        "-E",
                                        "-x",
                                        "c++",
                                        "-std=c++20",
                                        "-nostdinc",
                                        "-nostdinc++",
                                        "-D__METAL__=1",
                                        "-D__HAVE_BFLOAT__=1"};
  arguments.push_back(fmt::format("-D__METAL_VERSION__={}", options.msl_version));
  arguments.push_back("-I" + (folder / kShimFolder / "stubs").string());
  for (const std::string& other : options.include_folders) arguments.push_back("-I" + other);
  for (const std::string& define : options.defines) arguments.push_back("-D" + define);
  return arguments;
}

std::vector<std::string> CompilerArguments(const std::string& clang, const fs::path& folder,
                                           const CompileOptions& options) {
  std::vector<std::string> arguments = {clang};
  arguments.insert(arguments.end(), kCompileFlags.begin(), kCompileFlags.end());
#if defined(__x86_64__)
  // Conversions of half as one instruction each, with the results of the functions they are else.
  if (__builtin_cpu_supports("f16c") != 0) arguments.emplace_back("-mf16c");
#endif
  if (options.fast_math) {
    arguments.insert(arguments.end(), kFastMathFlags.begin(), kFastMathFlags.end());
  }
  arguments.push_back(fmt::format("-D__METAL_VERSION__={}", options.msl_version));
  arguments.insert(arguments.end(),
                   {"-include", (folder / kShimFolder / "msl.h").string(), "-I" + folder.string()});
  return arguments;
}

/// "file.metal:12" of a line that addr2line prints: "/a/b/file.metal:12 (discriminator 2)"; empty
/// for the shim's own files, the rewriter's table, and what is unknown.
std::string PlaceOf(std::string_view line, const std::string& shim) {
  const bool ours = line.starts_with(shim) || line.find("metal_sim_module:") != line.npos;
  if (ours || line.starts_with("??")) return {};
  line = line.substr(0, line.find(" ("));
  return fs::path(line).filename().string();
}

}  // namespace

Status MetalProgram::CheckCompiler() { return FindClang().status(); }

Result<std::unique_ptr<MetalProgram>> MetalProgram::Compile(const fs::path& source,
                                                            const CompileOptions& options) {
  std::error_code missing;
  if (!fs::is_regular_file(source, missing)) {
    return Status(Code::kIo, source.string() + ": no such file");
  }
  MARLIN_ASSIGN_OR_RETURN(const std::string clang, FindClang());
  std::unique_ptr<MetalProgram> program(new MetalProgram());
  MARLIN_ASSIGN_OR_RETURN(program->folder_, MakeTemporaryFolder());
  const fs::path& folder = program->folder_;
  for (const ShimFile& file : ShimFiles()) {
    MARLIN_RETURN_IF_ERROR(WriteText(folder / kShimFolder / file.path, file.text));
  }
  std::vector<std::string> arguments = PreprocessorArguments(clang, folder, options);
  arguments.push_back(source.string());
  MARLIN_ASSIGN_OR_RETURN(std::string preprocessed, RunCompiler(arguments));
  MARLIN_ASSIGN_OR_RETURN(const RewrittenSource rewritten, RewriteMetal(WithoutUnrolling(std::move(preprocessed))));
  const fs::path text = folder / "kernels.cc";
  MARLIN_RETURN_IF_ERROR(WriteText(text, rewritten.text));
  program->library_ = folder / "kernels.so";
  arguments = CompilerArguments(clang, folder, options);
  arguments.insert(arguments.end(), {text.string(), "-o", program->library_.string()});
  MARLIN_RETURN_IF_ERROR(RunCompiler(arguments).status());
  MARLIN_RETURN_IF_ERROR(program->Load());
  return program;
}

MetalProgram::~MetalProgram() {
  if (handle_ != nullptr) dlclose(handle_);
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
}

Status MetalProgram::Load() {
  handle_ = dlopen(library_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) return Status(Code::kInternal, fmt::format("metal-sim: {}", dlerror()));
  const auto attach =
      reinterpret_cast<decltype(&metal_sim_attach)>(dlsym(handle_, "metal_sim_attach"));
  const auto module =
      reinterpret_cast<decltype(&metal_sim_module)>(dlsym(handle_, "metal_sim_module"));
  if (attach == nullptr || module == nullptr) {
    return Status(Code::kInternal, library_.string() + ": exports no kernels");
  }
  attach(SimulatorRuntime());
  module_ = module();
  struct Search {
    const fs::path& library;
    std::vector<std::pair<const void*, const void*>>* ranges;
  } search = {library_, &ranges_};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        const auto* const wanted = static_cast<const Search*>(data);
        if (wanted->library != info->dlpi_name) return 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
          const uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
          // The loader gives numbers.
          const auto* first =
              reinterpret_cast<const uint8_t*>(begin);  // NOLINT(performance-no-int-to-ptr)
          wanted->ranges->emplace_back(first, first + info->dlpi_phdr[i].p_memsz);
        }
        return 1;
      },
      &search);
  return Status();
}

Result<const metal_sim::Kernel*> MetalProgram::Find(const std::string& name) const {
  std::vector<std::string> names;
  for (int i = 0; i < module_->kernel_count; ++i) {
    if (name == module_->kernels[i].name) return &module_->kernels[i];
    names.emplace_back(module_->kernels[i].name);
  }
  return Status(Code::kInvalidArgument,
                fmt::format("kernel: no '{}'; there are: {}", name, fmt::join(names, ", ")));
}

Status MetalProgram::SetConstants(const ConstantValues& values) {
  size_t used = 0;
  for (int i = 0; i < module_->constant_count; ++i) {
    const metal_sim::FunctionConstant& constant = module_->constants[i];
    const auto found = values.find(constant.index);
    *constant.defined = found != values.end();
    std::memset(constant.value, 0, constant.bytes);
    if (found == values.end()) continue;
    ++used;
    if (found->second.size() != constant.bytes) {
      return Status(
          Code::kInvalidArgument,
          fmt::format("function constant {} ({}): expected {} bytes, got {}", constant.index,
                      constant.name, constant.bytes, found->second.size()));
    }
    std::memcpy(constant.value, found->second.data(), constant.bytes);
  }
  if (used == values.size()) return Status();
  for (const auto& [index, bytes] : values) {
    bool known = false;
    for (int i = 0; i < module_->constant_count; ++i) {
      known = known || module_->constants[i].index == index;
    }
    if (!known) {
      return Status(Code::kInvalidArgument, fmt::format("function constant {}: not used", index));
    }
  }
  return Status();
}

std::vector<std::string> MetalProgram::Locate(const std::vector<const void*>& sites) const {
  std::vector<std::string> places(sites.size());
  std::vector<std::string> arguments = {"addr2line", "-a", "-i", "-e", library_.string()};
  std::vector<size_t> asked;
  const auto* base = ranges_.empty() ? nullptr : static_cast<const uint8_t*>(ranges_[0].first);
  for (size_t i = 0; i < sites.size(); ++i) {
    if (sites[i] == nullptr || base == nullptr) continue;
    // The address behind a call may be the next line's.
    const auto offset = static_cast<const uint8_t*>(sites[i]) - base - 1;
    arguments.push_back(fmt::format("{:#x}", offset));
    asked.push_back(i);
  }
  if (asked.empty()) return places;
  const Result<ChildOutput> output = RunChild(arguments);
  if (!output.ok()) return places;
  std::istringstream lines(output->out);
  std::string line;
  const std::string shim = (folder_ / kShimFolder).string();
  size_t next = 0;
  while (std::getline(lines, line)) {
    if (line.starts_with("0x")) {
      ++next;
      continue;
    }
    const std::string place = PlaceOf(line, shim);
    if (next == 0 || next > asked.size() || place.empty()) continue;
    std::string& text = places[asked[next - 1]];
    text += (text.empty() ? "" : " < ") + place;
  }
  return places;
}

}  // namespace marlin::metal::simulator
