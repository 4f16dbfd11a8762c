// Clang as it is run on Metal sources: found, given a folder with the shim, and used to preprocess.
// Must not know how the result is used.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "metal_sim/child_process.h"
#include "metal_sim/status.h"
#include "metal_sim/temporary_folder.h"

namespace metal_sim {

struct CompileOptions {
  std::vector<std::string> defines;          ///< "NAME" or "NAME=VALUE".
  std::vector<std::string> include_folders;  ///< After the source's own folder.
  int msl_version = 310;                     ///< 310: MSL 3.1.
  bool fast_math = false;
  /// The kernels that are wanted; empty: all. Files of hundreds of kernels take minutes.
  std::vector<std::string> kernels = {};
  /// Counts the instruction slots of launches (slot_count.h) instead of checking accesses.
  bool count_slots = false;
  /// The compiler, a clang++ of version 19 or newer. Empty: METAL_SIM_CLANG of the environment,
  /// else the first that is found.
  std::string clang = {};
};

/// A compiler and its temporary folder, which is removed at the end. Move-only.
class MetalCompiler {
 public:
  /// `named` is CompileOptions::clang. Errors: kUnsupported (no clang that is new enough), kIo.
  static Result<MetalCompiler> Make(const std::string& named);
  /// Whether there is a compiler. Errors: kUnsupported.
  static Status Check(const std::string& named);

  const std::filesystem::path& folder() const { return folder_.path(); }
  /// The output of the compiler's --version.
  const std::string& version() const { return version_; }
  /// The shim's files below the folder, where its own #include lines look for them.
  std::filesystem::path shim() const;

  /// Writes a file of the folder. Returns its path. Errors: kIo.
  Result<std::filesystem::path> Write(const std::filesystem::path& name,
                                      std::string_view text) const;
  /// Runs the compiler. Errors: kIo (it cannot be started).
  Result<ChildOutput> Run(std::vector<std::string> arguments) const;
  /// The source with macros and #include lines expanded, without Metal's own headers and without
  /// pragmas that unroll loops. Errors: kIo
  /// (no such file), kInvalidArgument with the first message of the compiler.
  Result<std::string> Preprocess(const std::filesystem::path& source,
                                 const CompileOptions& options) const;

  /// Defines the version of the language.
  static std::string VersionFlag(const CompileOptions& options);
  /// The first error message of the compiler.
  static std::string FirstError(const std::string& messages);

 private:
  MetalCompiler() = default;

  std::string clang_;
  std::string version_;
  TemporaryFolder folder_;
};

}  // namespace metal_sim
