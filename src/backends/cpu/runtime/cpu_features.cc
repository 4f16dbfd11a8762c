#include "backends/cpu/runtime/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstring>
#include <string_view>

#include "base/find_named.h"
#include "base/macros.h"

namespace marlin::cpu {
namespace {

#if defined(__x86_64__)
struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers Cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool Bit(unsigned word, int bit) { return ((word >> bit) & 1u) != 0; }

uint64_t SavedState() {
  unsigned low = 0;
  unsigned high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

/// Requests permission for the AMX tile state from Linux, for the whole process with all threads.
bool RequestTilePermission() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

std::string ModelName() {
  char brand[49] = {};
  for (unsigned i = 0; i < 3; ++i) {
    const Registers r = Cpuid(0x80000002u + i, 0);
    const unsigned words[4] = {r.eax, r.ebx, r.ecx, r.edx};
    std::memcpy(brand + 16 * i, words, 16);
  }
  const std::string name = brand;
  const size_t first = name.find_first_not_of(' ');
  return first == std::string::npos ? "x86-64" : name.substr(first);
}

CpuFeatures Probe() {
  CpuFeatures features;
  features.model = ModelName();
  const Registers basic = Cpuid(1, 0);
  const Registers extended = Cpuid(7, 0);
  const Registers extended1 = Cpuid(7, 1);
  if (!Bit(basic.ecx, 27)) return features;  // OSXSAVE
  const uint64_t state = SavedState();
  const bool ymm = (state & 0x6) == 0x6;
  const bool zmm = (state & 0xe6) == 0xe6;
  const bool tiles = (state & 0x60000) == 0x60000;
  features.avx2 = ymm && Bit(extended.ebx, 5) && Bit(basic.ecx, 12) && Bit(basic.ecx, 29);
  features.avx512 = features.avx2 && zmm && Bit(extended.ebx, 16) && Bit(extended.ebx, 17) &&
                    Bit(extended.ebx, 30) && Bit(extended.ebx, 31) && Bit(extended.ecx, 1) &&
                    Bit(extended.ecx, 6);
  features.avx512_vnni = features.avx512 && Bit(extended.ecx, 11);
  features.avx512_bf16 = features.avx512 && Bit(extended1.eax, 5);
  features.amx_bf16 = features.avx512_bf16 && tiles && Bit(extended.edx, 24) &&
                      Bit(extended.edx, 22) && RequestTilePermission();
  return features;
}
#else
CpuFeatures Probe() {
  CpuFeatures features;
#if defined(__aarch64__)
  features.neon = true;  // Part of the architecture.
  features.model = "arm64";
#else
  features.model = "generic";
#endif
  return features;
}
#endif

struct LevelName {
  Isa level;
  const char* name;
};
constexpr LevelName kLevels[] = {{Isa::kScalar, "scalar"},
                                 {Isa::kAvx2, "avx2"},
                                 {Isa::kAvx512, "avx512"},
                                 {Isa::kAmx, "amx"},
                                 {Isa::kNeon, "neon"}};

}  // namespace

std::vector<std::string> CpuFeatures::Names() const {
  std::vector<std::string> names;
  const auto add = [&](bool present, const char* name) {
    if (present) names.emplace_back(name);
  };
  add(avx2, "avx2");
  add(avx512, "avx512");
  add(avx512_vnni, "avx512_vnni");
  add(avx512_bf16, "avx512_bf16");
  add(amx_bf16, "amx_bf16");
  add(neon, "neon");
  return names;
}

const CpuFeatures& GetCpuFeatures() {
  static const CpuFeatures features = Probe();
  return features;
}

Isa BestLevel(const CpuFeatures& features) {
  if (features.amx_bf16) return Isa::kAmx;
  if (features.avx512) return Isa::kAvx512;
  if (features.avx2) return Isa::kAvx2;
  if (features.neon) return Isa::kNeon;
  return Isa::kScalar;
}

Status CheckLevel(Isa level, const CpuFeatures& features) {
  const bool ok = level == Isa::kScalar || (level == Isa::kAvx2 && features.avx2) ||
                  (level == Isa::kAvx512 && features.avx512) ||
                  (level == Isa::kAmx && features.amx_bf16) ||
                  (level == Isa::kNeon && features.neon);
  if (ok) return Status();
  return Status(Code::kUnsupported, std::string("level ") + IsaName(level) +
                                        ": this processor or operating system does not offer it");
}

Result<Isa> ParseIsa(std::string_view what, const std::string& name) {
  MARLIN_ASSIGN_OR_RETURN(const LevelName level,
                          FindNamed(what, "level", name, kLevels, [](const LevelName& row) {
                            return std::string_view(row.name);
                          }));
  return level.level;
}

}  // namespace marlin::cpu
