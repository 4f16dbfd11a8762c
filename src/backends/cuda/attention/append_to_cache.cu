// Appends keys and values to the pages of their positions.
#include "backends/cuda/attention/cache_codes.cuh"
#include "backends/cuda/attention/pages.cuh"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/decoder/views.h"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 128;

struct AppendArguments {
  RowsView keys;    ///< [rows, kv_heads] rows.
  RowsView values;  ///< Null data: in the keys.
  SequencesView sequences;
  PagesView pages;
  ErrorView errors;
};

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
    found = PageOfRow(args.sequences, args.pages, row, args.errors);
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

int64_t WorkspaceBytes(const AppendToCacheCall& call, const DeviceShape& /*device*/) {
  return SlabTableBytes(call.cache);
}

Status Run(const AppendToCacheCall& call, const CallContext& context) {
  AppendArguments args = {RowsOf(call.keys), {}, SequencesOf(call.rows), {}, context.errors};
  if (!call.cache.values_in_keys) args.values = RowsOf(call.values);
  cudaError_t error = PagesOf(call.cache, context, &args.pages);
  const dim3 grid(static_cast<unsigned>(args.sequences.rows),
                  static_cast<unsigned>(args.pages.kv_heads));
  if (error == cudaSuccess) {
    error = LaunchInChain(&AppendKernel, grid, kThreads, 0, context.stream, args);
  }
  return context.Check(error, "append_to_cache");
}

}  // namespace marlin::cuda
