// The ceilings of this machine, measured: what memory delivers and what the units multiply.
#pragma once

#include <cstdint>

#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "marlin/status.h"
#include "plan/kernel_desc.h"

namespace marlin::cpu {

/// Loops that saturate one resource; per instruction set, in its own namespace.
struct RooflineProbes {
  /// Reads `bytes` from `streams` equally long runs at once; returns something that depends on all.
  uint32_t (*read)(const uint8_t* data, int64_t bytes, int streams);
  /// Runs independent FMAs; returns the number of floating-point operations done.
  int64_t (*fma)(int64_t iterations, float* sink);
};

namespace scalar {
extern const RooflineProbes kRooflineProbes;
}
namespace avx2 {
extern const RooflineProbes kRooflineProbes;
}
namespace avx512 {
extern const RooflineProbes kRooflineProbes;
}
namespace amx {
/// Products of tiles held in registers; returns the floating-point operations done.
int64_t MultiplyTiles(int64_t iterations);
}  // namespace amx

/// Memory to read from, larger than the caches, and the loops of one level.
class Roofline {
 public:
  /// Errors: kOutOfMemory.
  static Result<Roofline> Make(Isa level, ThreadPool& pool);

  /// Seconds to read kPassBytes once by all threads, each with `streams` streams; every call reads
  /// another part of the buffer.
  static constexpr int64_t kPassBytes = int64_t{32} << 20;
  double ReadSeconds(int streams);
  /// FLOP/s of fp32 FMAs, all threads, over a few milliseconds.
  double FmaFlops();
  /// FLOP/s of bf16 tile products; 0 where there are none.
  double TileFlops();
  /// Seconds of an empty fork and join.
  double ForkJoinSeconds();

 private:
  Roofline(Isa level, ThreadPool& pool, AlignedBuffer buffer);
  Isa level_;
  ThreadPool* pool_;
  const RooflineProbes* probes_;
  AlignedBuffer buffer_;
  int64_t position_ = 0;
};

}  // namespace marlin::cpu
