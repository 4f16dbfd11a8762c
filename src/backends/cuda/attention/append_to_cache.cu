// Appends keys and values to the pages of their positions.
#include "backends/cuda/attention/cache_codes.cuh"
#include "backends/cuda/attention/pages.cuh"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/decoder/decoder_launch.h"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 128;

MARLIN_DEVICE void AppendRow(const RowsView& from, int row, int features, const PagesView& pages,
                             int64_t first_element, int position, uint8_t* page) {
  const auto head = static_cast<int64_t>(blockIdx.y);
  const int64_t place = head * pages.page_tokens + position % pages.page_tokens;
  const int64_t to = first_element + place * features;
  const int64_t at = from.At(row, static_cast<int>(head));
  for (int i = static_cast<int>(threadIdx.x); i < features; i += kThreads) {
    StoreCached(page, pages.type, to + i, LoadFloat(from.data, from.type, at + i));
  }
}

/// blockIdx.x: row; blockIdx.y: KV head.
__global__ void __launch_bounds__(kThreads)
    AppendKernel(const __grid_constant__ AppendArguments args) {
  __shared__ uint8_t* found;
  EnterChain();
  const auto row = static_cast<int>(blockIdx.x);
  if (row == 0 && blockIdx.y == 0) CheckFirstRows(args.sequences, args.errors);
  if (threadIdx.x == 0) {
    const int sequence = SequenceOf(args.sequences, row);
    found = CheckPosition(args.sequences, sequence, row, args.errors)
                ? FindPage(args.sequences, args.pages, sequence, args.sequences.positions[row],
                           args.errors)
                : nullptr;
  }
  __syncthreads();
  uint8_t* const page = found;
  if (page == nullptr) return;
  const int position = args.sequences.positions[row];
  const PagesView& pages = args.pages;
  AppendRow(args.keys, row, pages.key_dim, pages, 0, position, page);
  if (pages.values_in_keys) return;
  AppendRow(args.values, row, pages.value_dim, pages, KeyElements(pages), position, page);
}

}  // namespace

cudaError_t LaunchAppend(const AppendArguments& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(args.sequences.rows),
                  static_cast<unsigned>(args.pages.kv_heads));
  return LaunchInChain(&AppendKernel, grid, kThreads, 0, stream, args);
}

}  // namespace marlin::cuda
