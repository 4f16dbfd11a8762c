// The measured roofline of this machine: memory bandwidth, FMA and tile throughput.
#pragma once

#include <cstdint>

#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "marlin/status.h"
#include "plan/gemm/kernel_desc.h"

namespace marlin::cpu {

/// Loops that saturate one resource each, per instruction set in its own namespace.
struct RooflineProbes {
  /// Reads `bytes` as `streams` concurrent streams of equal length; the result depends on all
  /// words, so that no load is optimised away.
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
/// Multiplies tiles in registers; returns the number of floating-point operations done.
int64_t MultiplyTiles(int64_t iterations);
}  // namespace amx

/// Whether vdpbf16ps does more operations per second than fp32 FMAs: twice as many on AMD's
/// processors, a third of them on Intel's with AMX. Measured once, in about 30 microseconds.
bool DotBeatsFma();

/// A read buffer larger than the caches, and the loops of one level.
class Roofline {
 public:
  /// Errors: kOutOfMemory.
  static Result<Roofline> Make(Isa level, ThreadPool& pool);

  /// Seconds to read kPassBytes once with all threads, `streams` streams each; successive calls
  /// read successive parts of the buffer.
  static constexpr int64_t kPassBytes = int64_t{32} << 20;
  double ReadSeconds(int streams);
  /// FLOP/s of fp32 FMAs, all threads, over a few milliseconds.
  double FmaFlops();
  /// FLOP/s of bf16 tile multiplies; 0 below the AMX level.
  double TileFlops();
  /// FLOP/s of bf16 dot products (vdpbf16ps); 0 without AVX-512 BF16.
  double DotFlops();
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
