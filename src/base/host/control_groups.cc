#include "base/host/control_groups.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string_view>
#include <vector>

#include "base/parse_number.h"

namespace marlin {
namespace {

template <typename T>
void Lower(std::optional<T>* limit, T value) {
  *limit = *limit ? std::min(**limit, value) : value;
}

/// The first words of a file, as numbers; fewer where a word is none, such as "max".
std::vector<int64_t> Numbers(const std::string& path) {
  std::vector<int64_t> numbers;
  std::ifstream file(path);
  std::string word;
  int64_t number = 0;
  while (numbers.size() < 2 && file >> word && ParseNumber(word, &number)) {
    numbers.push_back(number);
  }
  return numbers;
}

std::optional<int64_t> Number(const std::string& path) {
  const std::vector<int64_t> numbers = Numbers(path);
  return numbers.empty() ? std::nullopt : std::optional(numbers.front());
}

/// The value of "name VALUE" in a file of such lines; 0 if there is none.
int64_t Named(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  std::string word;
  int64_t value = 0;
  while (file >> word >> value) {
    if (word == name) return value;
  }
  return 0;
}

/// "/a/b", "/a" and "/" for "/a/b".
std::vector<std::string> WithParents(std::string path) {
  std::vector<std::string> paths;
  while (path.size() > 1 && path.front() == '/') {
    paths.push_back(path);
    path.resize(path.rfind('/'));
  }
  paths.emplace_back("/");
  return paths;
}

struct MemoryFiles {
  const char* limit;
  const char* used;
  const char* cache;  ///< The name in memory.stat.
};

void AddMemory(const std::string& folder, const MemoryFiles& files, GroupLimits* limits) {
  const std::optional<int64_t> limit = Number(folder + files.limit);
  // Version 1 has a number near 2^63 for "none".
  constexpr int64_t kNone = int64_t{1} << 60;
  if (!limit || *limit <= 0 || *limit >= kNone) return;
  Lower(&limits->memory, *limit);
  if (const std::optional<int64_t> used = Number(folder + files.used)) {
    const int64_t kept = *used - std::min(*used, Named(folder + "/memory.stat", files.cache));
    Lower(&limits->left, std::max<int64_t>(*limit - kept, 0));
  }
}

void AddQuota(int64_t quota, int64_t period, GroupLimits* limits) {
  if (quota > 0 && period > 0) {
    Lower(&limits->processors, static_cast<double>(quota) / static_cast<double>(period));
  }
}

void AddVersion2(const std::string& folder, GroupLimits* limits) {
  AddMemory(folder, {"/memory.max", "/memory.current", "inactive_file"}, limits);
  const std::vector<int64_t> quota = Numbers(folder + "/cpu.max");
  if (quota.size() == 2) AddQuota(quota[0], quota[1], limits);
}

void AddVersion1(const std::string& mounts, const std::string& group, GroupLimits* limits) {
  AddMemory(mounts + "/memory" + group,
            {"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file"}, limits);
  const std::string cpu = mounts + "/cpu" + group;
  AddQuota(Number(cpu + "/cpu.cfs_quota_us").value_or(0),
           Number(cpu + "/cpu.cfs_period_us").value_or(0), limits);
}

}  // namespace

GroupLimits ReadGroupLimits(const std::string& root) {
  GroupLimits limits;
  const std::string mounts = root + "/sys/fs/cgroup";
  // In a container its own group is the top folder, whatever the path in /proc says.
  AddVersion2(mounts, &limits);
  AddVersion1(mounts, "", &limits);
  std::ifstream groups(root + "/proc/self/cgroup");
  // "0::/a/b" in version 2, "4:memory:/a/b" in version 1.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const bool version2 = line.compare(0, second, "0:") == 0;
    for (const std::string& path : WithParents(line.substr(second + 1))) {
      const std::string folder = path == "/" ? "" : path;
      version2 ? AddVersion2(mounts + folder, &limits) : AddVersion1(mounts, folder, &limits);
    }
  }
  return limits;
}

}  // namespace marlin
