// Sums of experts on the GPU plus those that the host computed, rounded once.
#include <algorithm>

#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/common/launch.h"
#include "backends/cuda/rows/add_rows.h"
#include "plan/gemm/host_staging.h"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;
/// CTAs that stride over tokens, at most.
constexpr int kMostBlocks = 1024;

/// The arguments of the kernel, AddRowsCall.
struct AddRowsArguments {
  const float* sum = nullptr;  ///< Null: zeros.
  const float* rows = nullptr;
  const int32_t* slot_of = nullptr;
  int tokens = 0;
  int width = 0;
  void* out = nullptr;
  int64_t out_stride = 0;
  Element out_type = Element::kF32;
};

/// blockIdx.x and the threads: columns; blockIdx.y strides over the tokens.
__global__ void __launch_bounds__(kThreads)
    AddRowsKernel(const __grid_constant__ AddRowsArguments args) {
  const auto column = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (column >= args.width) return;
  for (int token = static_cast<int>(blockIdx.y); token < args.tokens;
       token += static_cast<int>(gridDim.y)) {
    const int slot = args.rows == nullptr ? -1 : args.slot_of[token];
    float value = 0.0f;
    if (args.sum != nullptr) value = args.sum[static_cast<int64_t>(token) * args.width + column];
    if (slot >= 0) {
      const float row = args.rows[static_cast<int64_t>(slot) * args.width + column];
      // A row alone keeps its bits, the sign of a zero among them.
      value = args.sum == nullptr ? row : value + row;
    }
    StoreFloat(args.out, args.out_type, token * args.out_stride + column, value);
  }
}

}  // namespace

cudaError_t LaunchAddRows(const AddRowsCall& call, cudaStream_t stream) {
  AddRowsArguments args = {call.sum,
                           call.rows,
                           call.slot_of,
                           static_cast<int>(call.tokens),
                           static_cast<int>(call.width),
                           call.out,
                           call.out_stride,
                           ElementOf(call.out_type)};
  void* parameters[] = {&args};
  const LaunchSize size = {dim3(static_cast<unsigned>((args.width + kThreads - 1) / kThreads),
                                static_cast<unsigned>(std::min(args.tokens, kMostBlocks))),
                           kThreads};
  return Launch(reinterpret_cast<const void*>(&AddRowsKernel), size, parameters, stream);
}

}  // namespace marlin::cuda
