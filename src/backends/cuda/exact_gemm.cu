// Products in fp32 throughout, for every layout, type, shape and alignment: what runs when
// exactness is asked for and where no tile kernel fits. A row's sums depend on nothing but the row.
//
//   thread block: 64 outputs x 16 rows, k in steps of 32: the block's weights are decoded into
//   shared memory once, each of 256 threads adds up 4 rows of one output, k in order.
#include "backends/cuda/launch.h"
#include "backends/cuda/weight_reader.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 64;
constexpr int kRows = 16;
constexpr int kStep = 32;
constexpr int kRowsOfThread = kRows * kColumns / kThreads;

/// The column of W behind column `c` of a block: gated blocks hold 32 gates and their 32 ups.
MARLIN_DEVICE int SourceColumn(const EpilogueView& epilogue, int block, int c) {
  if (!epilogue.gated) return block * kColumns + c;
  const int n = block * (kColumns / 2) + c % (kColumns / 2);
  if (n >= epilogue.n / 2) return epilogue.n;
  return c < kColumns / 2 ? n : n + epilogue.n / 2;
}

template <typename Reader>
__global__ void __launch_bounds__(kThreads)
    ExactGemmKernel(Reader reader, ActivationView a, EpilogueView epilogue) {
  __shared__ float weights[kStep][kColumns];
  __shared__ float rows[kRows][kStep];
  __shared__ float sums[kRows][kColumns];
  const int thread = static_cast<int>(threadIdx.x);
  const int column = thread % kColumns;
  const int first_row = static_cast<int>(blockIdx.x) * kRows;
  const int n = SourceColumn(epilogue, static_cast<int>(blockIdx.y), column);
  float sum[kRowsOfThread] = {};
  for (int k = 0; k < a.k; k += kStep) {
    for (int i = thread / kColumns; i < kStep; i += kThreads / kColumns) {
      weights[i][column] = n < epilogue.n && k + i < a.k ? reader.Weight(k + i, n) : 0.0f;
    }
    for (int i = thread; i < kRows * kStep; i += kThreads) {
      const int m = first_row + i / kStep;
      const int at = k + i % kStep;
      rows[i / kStep][i % kStep] =
          m < a.m && at < a.k ? LoadFloat(a.data, a.type, m * a.stride + at) : 0.0f;
    }
    __syncthreads();
    const int steps = min(kStep, a.k - k);
    for (int i = 0; i < steps; ++i) {
#pragma unroll
      for (int r = 0; r < kRowsOfThread; ++r) {
        sum[r] = __fmaf_rn(rows[thread / kColumns + r * (kThreads / kColumns)][i],
                           weights[i][column], sum[r]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < kRowsOfThread; ++r) {
    const int row = thread / kColumns + r * (kThreads / kColumns);
    if (epilogue.gated) {
      sums[row][column] = sum[r];
    } else if (first_row + row < a.m && n < epilogue.n) {
      Finish(epilogue, first_row + row, n, sum[r]);
    }
  }
  if (!epilogue.gated) return;
  __syncthreads();
  for (int i = thread; i < kRows * kColumns / 2; i += kThreads) {
    const int row = i / (kColumns / 2);
    const int c = i % (kColumns / 2);
    const int out = static_cast<int>(blockIdx.y) * (kColumns / 2) + c;
    if (first_row + row < a.m && out < epilogue.n / 2) {
      FinishGated(epilogue, first_row + row, out, sums[row][c], sums[row][c + kColumns / 2]);
    }
  }
}

template <typename Reader>
cudaError_t Launch(const Reader& reader, const ActivationView& a, const EpilogueView& epilogue,
                   cudaStream_t stream) {
  const int blocks = (epilogue.n + kColumns - 1) / kColumns;
  const dim3 grid(static_cast<unsigned>((a.m + kRows - 1) / kRows), static_cast<unsigned>(blocks));
  ExactGemmKernel<<<grid, kThreads, 0, stream>>>(reader, a, epilogue);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchExactTiles(const TileView& weights, CodeKind kind, const ActivationView& a,
                             const EpilogueView& epilogue, cudaStream_t stream) {
  return Launch(TileReader{weights, kind}, a, epilogue, stream);
}

cudaError_t LaunchExactCanonical(const CanonicalView& weights, const ActivationView& a,
                                 const EpilogueView& epilogue, cudaStream_t stream) {
  return Launch(CanonicalReader{weights}, a, epilogue, stream);
}

}  // namespace marlin::cuda
