#include "base/memory_size.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "base/checked.h"
#include "base/parse_number.h"

namespace marlin {

int64_t MemoryBytes() {
  const Checked installed = Checked(sysconf(_SC_PHYS_PAGES)) * Checked(sysconf(_SC_PAGESIZE));
  int64_t bytes = installed.Take().value_or(INT64_MAX);
#if defined(__linux__)
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream file(path);
    std::string text;
    int64_t limit = 0;
    // Without a limit the file says "max".
    if (file >> text && ParseNumber(text, &limit)) bytes = std::min(bytes, limit);
  }
#endif
  return bytes;
}

}  // namespace marlin
