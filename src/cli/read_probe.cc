#include "cli/read_probe.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/macros.h"
#include "base/thread_pool.h"

namespace marlin::cli {
namespace {

constexpr int64_t kBufferBytes = int64_t{512} << 20;
constexpr int64_t kChunkBytes = int64_t{4} << 20;
constexpr int kPasses = 7;
// Several streams a thread keep more cache lines in flight than the hardware prefetcher of one.
constexpr int64_t kStreams = 4;

uint64_t SumChunk(const uint64_t* data, int64_t count) {
  const int64_t quarter = count / kStreams;
  uint64_t sums[kStreams] = {};
  for (int64_t i = 0; i < quarter; ++i) {
    for (int64_t s = 0; s < kStreams; ++s) sums[s] += data[s * quarter + i];
  }
  return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace

Result<double> MeasureReadBandwidth() {
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer buffer, AlignedBuffer::Allocate(kBufferBytes));
  ThreadPool pool(0);
  const int64_t chunks = kBufferBytes / kChunkBytes;
  // Every page has to be a page of its own: untouched memory is one page of zeros.
  pool.Run(chunks, [&](int64_t chunk, int) {
    std::memset(buffer.data() + chunk * kChunkBytes, 1, static_cast<size_t>(kChunkBytes));
  });
  std::vector<uint64_t> sums(static_cast<size_t>(pool.worker_count()), 0);
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    pool.Run(chunks, [&](int64_t chunk, int worker) {
      sums[static_cast<size_t>(worker)] +=
          SumChunk(buffer.As<uint64_t>(chunk * kChunkBytes), kChunkBytes / 8);
    });
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(kBufferBytes) / elapsed.count());
  }
  uint64_t total = 0;
  for (uint64_t sum : sums) total += sum;
  // The sums have to be used, or the reads would be optimised away.
  if (total == 0) return Status(Code::kInternal, "read probe: the buffer reads as zeros");
  return best;
}

}  // namespace marlin::cli
