// Tuning tables: the fastest measured kernel of each GEMM. Parses and looks up; reads no files.
//
//   metal-marlin tuning 2
//   device NVIDIA H200
//   measured 2026-11-21 abc1234
//   # format group scales offsets activations output gated n k m kernel nanoseconds
//   fp4_e2m1 128 fp16 none bf16 bf16 plain 4096 4096 16 marlin_gemm_wgmma@32x4 8590
//
// Version 1 had no scales, offsets and output; its entries are read as if they had fp16 scales,
// zeros where the format requires them, and an output of the activations' type.
//
// A GEMM with m rows uses the entry of its key with the smallest measured m' in m <= m' < 2 m; if
// there is none, the cost model selects (select.h). So entries for powers of two cover every m, and
// no entry is extrapolated: tiles that hold m' rows hold m as well.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/status.h"
#include "plan/gemm/gemm_desc.h"
#include "plan/gemm/kernel_desc.h"

namespace marlin {

/// The properties of a GEMM, apart from m, that identify one list of measurements.
struct TuningKey {
  enum class Offsets { kNone, kZeros, kBiases };

  Format format = Format::kFp4E2M1;
  /// The largest power of two up to 128 that divides the group size; 128 for groups of all of k,
  /// 0 for formats without scales.
  int64_t group = 0;
  ScaleType scales = ScaleType::kF16;  ///< kF16 for formats without scales.
  Offsets offsets = Offsets::kNone;
  DType activations = DType::kBf16;
  DType output = DType::kBf16;
  bool gated = false;
  int64_t n = 0;
  int64_t k = 0;

  static TuningKey Of(const GemmDesc& desc);
  friend auto operator<=>(const TuningKey&, const TuningKey&) = default;
};

/// The fastest kernel of one problem.
struct TuningEntry {
  TuningKey key;
  int64_t m = 0;
  std::string kernel;
  KernelVariant variant;
  int64_t nanoseconds = 0;
};

/// The measurements of one run of `metal-marlin tune`.
struct TuningSection {
  std::string device;  ///< DeviceInfo::model.
  std::string date;    ///< Has no blanks, nor has `commit`.
  std::string commit;
  std::vector<TuningEntry> entries;
};

/// `file` names the text in errors. Errors: kMalformedFile with the line, also for another version
/// and for a problem that a section has twice. Names of kernels and devices may be anything.
Result<std::vector<TuningSection>> ParseTuning(std::string_view text, std::string_view file);

/// The inverse of ParseTuning.
std::string FormatTuning(std::span<const TuningSection> sections);

/// Adds a section and removes the entries for the same keys from other sections of its device.
void ReplaceTuning(TuningSection section, std::vector<TuningSection>& sections);

/// The measurements of one device. Immutable once filled.
class TuningTable {
 public:
  /// Adds the sections of a device; their entries replace all earlier entries of the same key.
  void Add(std::span<const TuningSection> sections, std::string_view device);

  /// The entry for a problem by the rule above; null if there is none.
  const TuningEntry* Find(const GemmDesc& desc) const;

  int64_t size() const;

 private:
  std::map<TuningKey, std::vector<TuningEntry>> entries_;  ///< Ascending m.
};

}  // namespace marlin
