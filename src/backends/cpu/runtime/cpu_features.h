// The instruction sets that the processor and the operating system let a process use.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "marlin/status.h"
#include "plan/gemm/kernel_desc.h"

namespace marlin::cpu {

struct CpuFeatures {
  bool avx2 = false;    ///< AVX2, FMA and F16C, enabled by the operating system.
  bool avx512 = false;  ///< F, BW, DQ, VL, VBMI and VBMI2.
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool amx_bf16 = false;  ///< AMX-TILE and AMX-BF16, with the OS kernel's permission.
  bool neon = false;
  std::string model;

  std::vector<std::string> Names() const;
};

/// Detected once from CPUID, the register state that the operating system saves (XCR0), and for AMX
/// the Linux kernel's permission, which is requested for the process.
const CpuFeatures& GetCpuFeatures();

/// The highest level that this machine can run.
Isa BestLevel(const CpuFeatures& features);

/// Whether a level can run here. Errors: kUnsupported, naming the level.
Status CheckLevel(Isa level, const CpuFeatures& features);

/// "scalar", "avx2", "avx512", "amx", "neon". Errors: kInvalidArgument beginning with `what` and
/// listing the names.
Result<Isa> ParseIsa(std::string_view what, const std::string& name);

}  // namespace marlin::cpu
