#include "metal_sim/metal_program.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "metal_sim/child_process.h"
#include "metal_sim/compile_flags.h"
#include "metal_sim/launch.h"
#include "metal_sim/msl_rewriter.h"
#include "metal_sim/program_cache.h"
#include "metal_sim/shim_files.h"

namespace metal_sim {
namespace {

namespace fs = std::filesystem;

/// The compiler's folder in the debug information of a program, which may outlive the folder.
constexpr std::string_view kFolder = "/metal-sim";

/// Flags of instrumentation, and of what it costs to name a place or an uninitialised value.
bool IsForChecks(const std::string& flag) {
  return flag.find("sanitize") != flag.npos || flag.starts_with("-gdwarf") || flag == "-shared" ||
         flag == "-ftrivial-auto-var-init=pattern";
}

/// Arguments that do not name the compiler's folder.
std::vector<std::string> CompilerArguments(const CompileOptions& options) {
  std::vector<std::string> arguments(kCompileFlags.begin(), kCompileFlags.end());
  if (options.count_slots) {
    std::erase_if(arguments, IsForChecks);
    arguments.insert(arguments.end(), kSlotFlags.begin(), kSlotFlags.end());
  }
#if defined(__x86_64__)
  // Conversions of half as one instruction each, with the results of the functions they are else.
  // Every processor with AVX2 has them; not every compiler can test for F16C itself.
  if (__builtin_cpu_supports("avx2") != 0) arguments.emplace_back("-mf16c");
#endif
  if (options.fast_math) {
    arguments.insert(arguments.end(), kFastMathFlags.begin(), kFastMathFlags.end());
  }
  arguments.push_back(MetalCompiler::VersionFlag(options));
  return arguments;
}

/// The key of a program's library: a hash of all that it depends on.
CacheKey KeyOf(const MetalCompiler& compiler, const std::vector<std::string>& arguments,
               const std::string& text) {
  CacheKey key;
  key.Add(compiler.version());
  for (const std::string& argument : arguments) key.Add(argument);
  for (const ShimFile& file : ShimFiles()) {
    key.Add(file.path);
    key.Add(file.text);
  }
  key.Add(WithoutFolders(text));
  return key;
}

/// "file.metal:12" of a line that addr2line prints: "/a/b/file.metal:12 (discriminator 2)"; empty
/// for the shim's own files, the rewriter's table, and unknown places.
std::string PlaceOf(std::string_view line) {
  const bool ours = line.starts_with(kFolder) || line.find("metal_sim_module:") != line.npos;
  if (ours || line.starts_with("??")) return {};
  line = line.substr(0, line.find(" ("));
  return fs::path(line).filename().string();
}

}  // namespace

Result<std::unique_ptr<MetalProgram>> MetalProgram::Compile(const fs::path& source,
                                                            const CompileOptions& options) {
  METAL_SIM_ASSIGN_OR_RETURN(MetalCompiler compiler, MetalCompiler::Make(options.clang));
  METAL_SIM_ASSIGN_OR_RETURN(const std::string preprocessed, compiler.Preprocess(source, options));
  METAL_SIM_ASSIGN_OR_RETURN(const RewrittenSource rewritten,
                             RewriteMetal(preprocessed, RewritePurpose::kRun, options.kernels));
  std::unique_ptr<MetalProgram> program(new MetalProgram(std::move(compiler)));
  const std::vector<std::string> arguments = CompilerArguments(options);
  const ProgramCache cache = ProgramCache::OfEnvironment();
  const CacheKey key = KeyOf(program->compiler_, arguments, rewritten.text);
  if (cache.Get(key, program->library_)) {
    if (program->Load().ok()) return program;
    cache.Remove(key);
  }
  METAL_SIM_RETURN_IF_ERROR(options.count_slots ? program->BuildCounting(arguments, rewritten.text)
                                                : program->Build(arguments, rewritten.text));
  cache.Put(key, program->library_);
  METAL_SIM_RETURN_IF_ERROR(program->Load());
  return program;
}

Result<std::vector<KernelEntry>> MetalProgram::List(const fs::path& source,
                                                    const CompileOptions& options) {
  METAL_SIM_ASSIGN_OR_RETURN(const MetalCompiler compiler, MetalCompiler::Make(options.clang));
  METAL_SIM_ASSIGN_OR_RETURN(const std::string preprocessed, compiler.Preprocess(source, options));
  METAL_SIM_ASSIGN_OR_RETURN(RewrittenSource rewritten, RewriteMetal(preprocessed));
  return std::move(rewritten.kernels);
}

Status MetalProgram::Build(std::vector<std::string> arguments, const std::string& text) const {
  METAL_SIM_ASSIGN_OR_RETURN(const fs::path source, compiler_.Write("kernels.cc", text));
  const std::string folder = compiler_.folder().string();
  arguments.insert(arguments.end(), {fmt::format("-fdebug-prefix-map={}={}", folder, kFolder),
                                     "-include", (compiler_.shim() / "msl.h").string(),
                                     "-I" + folder, source.string(), "-o", library_.string()});
  return RunCompiler(std::move(arguments));
}

Status MetalProgram::BuildCounting(std::vector<std::string> arguments,
                                   const std::string& text) const {
  METAL_SIM_ASSIGN_OR_RETURN(const fs::path source, compiler_.Write("kernels.cc", text));
  const std::string folder = compiler_.folder().string();
  const fs::path module = compiler_.folder() / "kernels.ll";
  arguments.insert(arguments.end(), {"-include", (compiler_.shim() / "msl.h").string(),
                                     "-I" + folder, source.string(), "-o", module.string()});
  METAL_SIM_RETURN_IF_ERROR(RunCompiler(std::move(arguments)));
  std::ostringstream compiled;
  compiled << std::ifstream(module).rdbuf();
  METAL_SIM_ASSIGN_OR_RETURN(const fs::path counted,
                             compiler_.Write("counted.ll", CountBlocks(compiled.str()).text));
  return RunCompiler({"-O1", "-Xclang", "-disable-llvm-passes", "-fPIC", "-shared", "-nostdlib++",
                      "-lm", "-w", counted.string(), "-o", library_.string()});
}

Status MetalProgram::RunCompiler(std::vector<std::string> arguments) const {
  METAL_SIM_ASSIGN_OR_RETURN(const ChildOutput output, compiler_.Run(std::move(arguments)));
  if (output.exit_code == 0) return Status();
  return Status(Code::kInvalidArgument, MetalCompiler::FirstError(output.error));
}

MetalProgram::MetalProgram(MetalCompiler compiler)
    : compiler_(std::move(compiler)), library_(compiler_.folder() / "kernels.so") {}

MetalProgram::~MetalProgram() {
  if (handle_ != nullptr) dlclose(handle_);
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
  slots_ = {static_cast<const int64_t*>(dlsym(handle_, "metal_sim_slot_blocks")),
            static_cast<const int64_t*>(dlsym(handle_, "metal_sim_slot_costs")),
            static_cast<int64_t*>(dlsym(handle_, "metal_sim_slot_runs"))};
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

Result<const Kernel*> MetalProgram::Find(const std::string& name) const {
  std::vector<std::string> names;
  for (int i = 0; i < module_->kernel_count; ++i) {
    if (name == module_->kernels[i].name) return &module_->kernels[i];
    names.emplace_back(module_->kernels[i].name);
  }
  return Status(Code::kInvalidArgument, NoKernelText(name, names));
}

Status MetalProgram::SetConstants(const ConstantValues& values) {
  size_t used = 0;
  for (int i = 0; i < module_->constant_count; ++i) {
    const FunctionConstant& constant = module_->constants[i];
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
    // The address after a call may be the next line's.
    const auto offset = static_cast<const uint8_t*>(sites[i]) - base - 1;
    arguments.push_back(fmt::format("{:#x}", offset));
    asked.push_back(i);
  }
  if (asked.empty()) return places;
  const Result<ChildOutput> output = RunChild(arguments);
  if (!output.ok()) return places;
  std::istringstream lines(output->out);
  std::string line;
  size_t next = 0;
  while (std::getline(lines, line)) {
    if (line.starts_with("0x")) {
      ++next;
      continue;
    }
    const std::string place = PlaceOf(line);
    if (next == 0 || next > asked.size() || place.empty()) continue;
    std::string& text = places[asked[next - 1]];
    text += (text.empty() ? "" : " < ") + place;
  }
  return places;
}

}  // namespace metal_sim
