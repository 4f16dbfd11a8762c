// Metal sources as libraries that the simulator runs: preprocessed, rewritten and compiled by clang
// for this machine, loaded into this process. Knows nothing of launches.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "metal_sim/metal_compiler.h"
#include "metal_sim/msl_rewriter.h"
#include "metal_sim/shim/abi.h"
#include "metal_sim/slot_count.h"
#include "metal_sim/status.h"

namespace metal_sim {

/// Values of [[function_constant(index)]], as their bytes.
using ConstantValues = std::map<int, std::vector<uint8_t>>;

class MetalProgram {
 public:
  /// Compiles the kernels of a file, which takes seconds, or finds them where an earlier process
  /// left them (program_cache.h). Errors: kIo (no such file), kUnsupported (no clang that is new
  /// enough), kInvalidArgument with the first message of the compiler, "file.metal:12:3: ...".
  static Result<std::unique_ptr<MetalProgram>> Compile(const std::filesystem::path& source,
                                                       const CompileOptions& options);
  /// The kernels of a file, which is not compiled. Errors: as Compile, without what only the
  /// compiler notices.
  static Result<std::vector<KernelEntry>> List(const std::filesystem::path& source,
                                               const CompileOptions& options);
  ~MetalProgram();
  MetalProgram(const MetalProgram&) = delete;
  MetalProgram& operator=(const MetalProgram&) = delete;

  /// Valid as long as the program.
  const Module& module() const { return *module_; }
  /// Errors: kInvalidArgument, naming the kernels that there are.
  Result<const Kernel*> Find(const std::string& name) const;
  /// Sets all function constants; those without a value are undefined. Errors: kInvalidArgument
  /// (unknown index, or another number of bytes than the constant has).
  Status SetConstants(const ConstantValues& values);
  /// "file.metal:12" for every address of code, with callers where code was inlined:
  /// "file.metal:12 < file.metal:40"; empty where nothing is known.
  std::vector<std::string> Locate(const std::vector<const void*>& sites) const;
  /// The instruction slots of the launches since the last call, over all threads; 0 without
  /// CompileOptions::count_slots.
  int64_t TakeSlots() const { return slots_.Take(); }
  /// The memory of this process that belongs to the program.
  const std::vector<std::pair<const void*, const void*>>& ranges() const { return ranges_; }

 private:
  explicit MetalProgram(MetalCompiler compiler);
  Status Build(std::vector<std::string> arguments, const std::string& text) const;
  /// Build, with a counter in every block.
  Status BuildCounting(std::vector<std::string> arguments, const std::string& text) const;
  Status RunCompiler(std::vector<std::string> arguments) const;
  Status Load();

  MetalCompiler compiler_;  ///< Holds the folder that the library is in.
  std::filesystem::path library_;
  void* handle_ = nullptr;
  const Module* module_ = nullptr;
  SlotVariables slots_;
  std::vector<std::pair<const void*, const void*>> ranges_;
};

}  // namespace metal_sim
