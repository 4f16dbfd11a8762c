#include "quantize/gptq_steps.h"

namespace marlin {
namespace {

// Where the loader can choose, wider vectors do the same operations in the same order. It chooses
// before ThreadSanitizer is ready, which instruments the choice, too.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#define MARLIN_ANY_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MARLIN_ANY_VECTORS
#endif

// Local, since g++ 12 exports clones whose visibility is hidden.
MARLIN_ANY_VECTORS void AddRows(const float* factors, const float* rows, int64_t count,
                                GptqLanes& sums) {
  float local[kGptqColumns] = {};
  for (int64_t j = 0; j < count; ++j) {
    const float factor = factors[j];
    const float* const row = rows + j * kGptqColumns;
    for (int64_t c = 0; c < kGptqColumns; ++c) local[c] += factor * row[c];
  }
  for (int64_t c = 0; c < kGptqColumns; ++c) sums[c] += local[c];
}

}  // namespace

void AddCombination(const float* factors, const float* rows, int64_t count, GptqLanes& sums) {
  AddRows(factors, rows, count, sums);
}

}  // namespace marlin
