#include "metal_sim/type_check.h"

#include <sstream>
#include <string_view>
#include <utility>

#include "metal_sim/msl_rewriter.h"

namespace metal_sim {
namespace {

/// Program-scope variables outside of constant memory, for which Metal has no place.
constexpr const char* kWithoutFeatures =
    "-cl-ext=-__opencl_c_program_scope_global_variables,-__opencl_c_pipes,"
    "-__opencl_c_device_enqueue";

constexpr const char* kFlags[] = {"-x",
                                  "clcpp",
                                  "-cl-std=clc++2021",
                                  "-cl-no-stdinc",
                                  "-cl-single-precision-constant",
                                  "-Xclang",
                                  kWithoutFeatures,
                                  "-fsyntax-only",
                                  "-ferror-limit=0",
                                  "-fshow-overloads=all",
                                  "-fno-caret-diagnostics",
                                  "-fno-color-diagnostics",
                                  "-Wno-c++11-narrowing",  // Vectors are built of any numbers.
                                  "-w"};

constexpr std::string_view kError = " error: ";
constexpr std::string_view kNote = " note: ";

/// An error with its notes.
struct Diagnostic {
  std::string text;
  std::string notes;
};

std::vector<Diagnostic> ReadDiagnostics(const std::string& messages) {
  std::vector<Diagnostic> diagnostics;
  std::istringstream lines(messages);
  std::string line;
  while (std::getline(lines, line)) {
    if (line.find(kError) != std::string::npos) {
      diagnostics.push_back({line, ""});
    } else if (line.find(kNote) != std::string::npos && !diagnostics.empty()) {
      diagnostics.back().notes += line + "\n";
    }
  }
  return diagnostics;
}

/// The error at the line of the source that caused it, where it is in a template of the shim.
std::string PlacedText(const Diagnostic& diagnostic, const std::string& shim) {
  if (!diagnostic.text.starts_with(shim)) return diagnostic.text;
  std::istringstream notes(diagnostic.notes);
  for (std::string note; std::getline(notes, note);) {
    const size_t end = note.find(kNote);
    const bool caused = note.find("requested here") != std::string::npos;
    if (note.starts_with(shim) || end == std::string::npos || !caused) continue;
    return note.substr(0, end) + diagnostic.text.substr(diagnostic.text.find(kError));
  }
  return diagnostic.text;
}

/// For `c ? F() : x` the compiler reports that a T and a __private T do not match.
bool IsPrivateTemporary(const Diagnostic& diagnostic) {
  if (diagnostic.text.find("incompatible operand types ('") == std::string::npos) return false;
  std::vector<std::string> types;
  std::istringstream parts(diagnostic.text.substr(diagnostic.text.find('\'')));
  for (std::string part; std::getline(parts, part, '\'');) {
    constexpr std::string_view kPrivate = "__private ";
    const size_t at = part.find(kPrivate);
    if (at != std::string::npos) part.erase(at, kPrivate.size());
    types.push_back(part);
  }
  return types.size() > 3 && types[1] == types[3];
}

/// Metal converts half and bfloat to each other where that is asked for.
bool IsBfloatConversion(const Diagnostic& diagnostic) {
  const std::string& text = diagnostic.text;
  return text.find(" is not allowed") != std::string::npos &&
         text.find("__bf16") != std::string::npos && text.find("to 'half'") != std::string::npos;
}

/// The address space that OpenCL C++ gives where none is named: to pointers, which are checked
/// before, and to the objects of member functions, also of the implicit ones that copy. In Metal an
/// object may be copied out of constant memory, and a member function takes its own for the
/// thread's.
bool IsGeneric(const Diagnostic& diagnostic) {
  return (diagnostic.text + diagnostic.notes).find("__generic") != std::string::npos;
}

}  // namespace

Result<std::vector<std::string>> TypeCheck(const std::filesystem::path& source,
                                           const CompileOptions& options) {
  METAL_SIM_ASSIGN_OR_RETURN(const MetalCompiler compiler, MetalCompiler::Make(options.clang));
  METAL_SIM_ASSIGN_OR_RETURN(const std::string preprocessed, compiler.Preprocess(source, options));
  METAL_SIM_ASSIGN_OR_RETURN(const RewrittenSource rewritten,
                             RewriteMetal(preprocessed, RewritePurpose::kTypeCheck));
  METAL_SIM_ASSIGN_OR_RETURN(const std::filesystem::path text,
                             compiler.Write("checked.clcpp", rewritten.text));
  std::vector<std::string> arguments(std::begin(kFlags), std::end(kFlags));
  arguments.push_back(MetalCompiler::VersionFlag(options));
  arguments.insert(arguments.end(), {"-include", (compiler.shim() / "type_check.h").string(),
                                     "-I" + compiler.folder().string(), text.string()});
  METAL_SIM_ASSIGN_OR_RETURN(const ChildOutput output, compiler.Run(std::move(arguments)));
  const std::vector<Diagnostic> diagnostics = ReadDiagnostics(output.error);
  if (output.exit_code != 0 && diagnostics.empty()) {
    return Status(Code::kInternal, MetalCompiler::FirstError(output.error));
  }
  std::vector<std::string> findings = rewritten.refused;
  for (const Diagnostic& diagnostic : diagnostics) {
    const bool allowed =
        IsPrivateTemporary(diagnostic) || IsBfloatConversion(diagnostic) || IsGeneric(diagnostic);
    if (!allowed) findings.push_back(PlacedText(diagnostic, compiler.shim().string()));
  }
  return findings;
}

}  // namespace metal_sim
