#include "backends/cpu/runtime/roofline.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "backends/cpu/gemm/bf16/bf16_kernel.h"
#include "backends/cpu/runtime/cpu_features.h"
#include "base/macros.h"

namespace marlin::cpu {
namespace {

constexpr int64_t kBufferBytes = int64_t{1} << 30;

const RooflineProbes& ProbesOf(Isa level) {
#if defined(__x86_64__)
  if (level == Isa::kAvx2) return avx2::kRooflineProbes;
  if (level == Isa::kAvx512 || level == Isa::kAmx) return avx512::kRooflineProbes;
#endif
  (void)level;
  return scalar::kRooflineProbes;
}

template <typename Body>
double Seconds(Body&& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Total FLOP/s of a loop that every worker runs once.
template <typename Loop>
double Flops(ThreadPool& pool, Loop&& loop) {
  std::atomic<int64_t> total{0};
  const double seconds = Seconds(
      [&] { pool.Run(pool.worker_count(), [&](int64_t, int) { total.fetch_add(loop()); }); });
  return static_cast<double>(total.load()) / seconds;
}

}  // namespace

bool DotBeatsFma() {
#if defined(__x86_64__)
  static const bool beats = [] {
    if (!GetCpuFeatures().avx512_bf16) return false;
    constexpr int kRounds = 8;  // The best round was not interrupted.
    constexpr int64_t kIterations = 256;
    float sink = 0;
    double dot = 0;
    double fma = 0;
    const auto rate = [](auto&& loop) {
      int64_t operations = 0;
      const double seconds = Seconds([&] { operations = loop(); });
      return static_cast<double>(operations) / seconds;
    };
    for (int round = 0; round < kRounds; ++round) {
      dot = std::max(dot, rate([&] { return avx512bf16::DotChains(kIterations, &sink); }));
      fma = std::max(fma, rate([&] { return avx512::kRooflineProbes.fma(kIterations, &sink); }));
    }
    return dot > fma;
  }();
  return beats;
#else
  return false;
#endif
}

Roofline::Roofline(Isa level, ThreadPool& pool, AlignedBuffer buffer)
    : level_(level), pool_(&pool), probes_(&ProbesOf(level)), buffer_(std::move(buffer)) {}

Result<Roofline> Roofline::Make(Isa level, ThreadPool& pool) {
  MARLIN_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Allocate(kBufferBytes));
  // Write all pages, in parallel: each must be resident and not the shared zero page.
  constexpr int64_t kPart = int64_t{16} << 20;
  pool.Run(kBufferBytes / kPart, [&](int64_t part, int) {
    std::memset(buffer.data() + part * kPart, 1, static_cast<size_t>(kPart));
  });
  return Roofline(level, pool, std::move(buffer));
}

double Roofline::ReadSeconds(int streams) {
  const uint8_t* data = buffer_.As<uint8_t>(position_);
  position_ = (position_ + kPassBytes) % kBufferBytes;
  const int64_t workers = pool_->worker_count();
  const int64_t part = kPassBytes / workers;
  std::atomic<uint32_t> sink{0};
  return Seconds([&] {
    pool_->Run(workers, [&](int64_t i, int) {
      sink.fetch_xor(probes_->read(data + i * part, part, streams), std::memory_order_relaxed);
    });
  });
}

double Roofline::FmaFlops() {
  return Flops(*pool_, [this] {
    float sink = 0;
    const int64_t operations = probes_->fma(1 << 20, &sink);
    return sink == 12345.0f ? operations + 1 : operations;
  });
}

double Roofline::TileFlops() {
#if defined(__x86_64__)
  if (level_ == Isa::kAmx) {
    return Flops(*pool_, [] { return amx::MultiplyTiles(1 << 17); });
  }
#endif
  return 0;
}

double Roofline::DotFlops() {
#if defined(__x86_64__)
  if (level_ >= Isa::kAvx512 && GetCpuFeatures().avx512_bf16) {
    return Flops(*pool_, [] {
      float sink = 0;
      const int64_t operations = avx512bf16::DotChains(1 << 20, &sink);
      return sink == 12345.0f ? operations + 1 : operations;
    });
  }
#endif
  return 0;
}

double Roofline::ForkJoinSeconds() {
  constexpr int kRounds = 1000;
  const double seconds = Seconds([&] {
    for (int i = 0; i < kRounds; ++i) pool_->Run(pool_->worker_count(), [](int64_t, int) {});
  });
  return seconds / kRounds;
}

}  // namespace marlin::cpu
