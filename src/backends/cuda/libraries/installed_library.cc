#include "backends/cuda/libraries/installed_library.h"

#include <glob.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/environment.h"

namespace marlin::cuda {
namespace {

std::vector<std::string> Glob(const std::string& pattern) {
  std::vector<std::string> paths;
  glob_t found{};
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  }
  globfree(&found);
  return paths;
}

/// Library names and paths to try, in order.
std::vector<std::string> Candidates(std::span<const char* const> names, const char* variable) {
  std::vector<std::string> candidates;
  const auto add_folders = [&](const std::string& pattern) {
    for (const char* name : names) {
      for (std::string& path : Glob(pattern + "/" + name)) candidates.push_back(std::move(path));
    }
  };
  if (const auto given = ReadEnvironment(variable)) {
    std::istringstream paths(given->value);
    for (std::string path; std::getline(paths, path, ':');) {
      if (path.empty()) continue;
      add_folders(path);
      candidates.push_back(path);
    }
  }
  candidates.insert(candidates.end(), names.begin(), names.end());
  add_folders("/usr/local/cuda*/lib64");
  std::vector<std::string> environments = {"/opt/*/.venv", "/opt/*", "/usr/local", "/usr"};
  if (const char* active = std::getenv("VIRTUAL_ENV"); active != nullptr) {
    environments.insert(environments.begin(), active);
  }
  for (const std::string& environment : environments) {
    add_folders(environment + "/lib/python3*/*-packages/nvidia/*/lib");
  }
  return candidates;
}

}  // namespace

bool OpenInstalled(std::span<const char* const> names, const char* variable,
                   FunctionRef<bool(void* library)> resolve) {
  for (const std::string& candidate : Candidates(names, variable)) {
    void* const opened = dlopen(candidate.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (opened == nullptr) continue;
    if (resolve(opened)) return true;
    dlclose(opened);
  }
  return false;
}

}  // namespace marlin::cuda
