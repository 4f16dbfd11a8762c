// head_product_R: HeadProduct of R rows at a time.
//   Grid of threadgroups: [outputs / 64][heads][rows / R].
// latent_expand: ExpandLatents.
//   Grid of threadgroups: [64 outputs of keys, then of values][heads][32 latents of a page].
#include "backends/metal/kernels/attention/attend_rows.h"
#include "backends/metal/kernels/attention/check_rows.h"
#include "backends/metal/kernels/attention/head_product.h"

using namespace metal;
using namespace marlin::kernels;

template <int kRowFragments>
[[kernel]] void head_product(device const uchar* x [[buffer(MARLIN_BUFFER_PRODUCT_INPUT)]],
                             device const uchar* weights [[buffer(MARLIN_BUFFER_KEY_WEIGHTS)]],
                             device uchar* out [[buffer(MARLIN_BUFFER_PRODUCT_OUT)]],
                             constant HeadProductParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             ushort simdgroup [[simdgroup_index_in_threadgroup]],
                             ushort lane [[thread_index_in_simdgroup]]) {
  const int first_output = int(group.x) * kProductOutputs + simdgroup * kSide;
  if (first_output >= p.outputs) return;
  const long head = group.y;
  const int first_row = (p.first_tile + int(group.z)) * kRowFragments * kSide;
  const ProductRows rows = {x + head * p.input_head_stride * CacheElementBytes(input_type),
                            p.input_stride, p.rows, p.inputs};
  const ProductWeights matrix = {
      weights + head * p.weight_head_stride * CacheElementBytes(key_type), key_type,
      p.weight_stride, p.outputs, false};
  ProductSums<kRowFragments> sums;
  MultiplyHead<kRowFragments>(sums, rows, first_row, matrix, first_output, lane);
  const ProductTarget target = {out, head * p.out_head_stride, p.out_stride, p.rows, p.outputs};
  StoreProducts<kRowFragments>(sums, target, first_row, first_output, lane);
}

#define MARLIN_HEAD_PRODUCT(name, ...) \
  template [[host_name(                \
      name)]] [[kernel]] decltype(head_product<__VA_ARGS__>) head_product<__VA_ARGS__>;

MARLIN_HEAD_PRODUCT("head_product_8", 1)
MARLIN_HEAD_PRODUCT("head_product_32", 4)

/// Reports the first page that is not allocated or does not have its tokens.
static METAL_FUNC void CheckLatents(threadgroup uint* scratch, device const int* pages,
                                    device const int* tokens, device int4* report, int thread_index,
                                    constant PagedRows& p) {
  uint first = kNothingWrong;
  for (int i = thread_index; i < p.rows && first == kNothingWrong; i += kAttendThreads) {
    if (tokens[i] < 0 || tokens[i] > p.page_tokens) first = 2 * uint(i) + 1;
    if (PageOf(pages[i], 1, p) == nullptr) first = 2 * uint(i);
  }
  const uint wrong = LeastOfThreads(scratch, first, thread_index);
  if (wrong == kNothingWrong || thread_index != 0) return;
  const int at = int(wrong / 2);
  const bool page = wrong % 2 == 0;
  *report =
      page ? int4(kNoLatentPage, pages[at], at, 0) : int4(kWrongPageTokens, tokens[at], at, 0);
}

/// Copies the RoPE part of latents `first` to `first` + 31 to the keys of a head.
static METAL_FUNC void CopyRope(device uchar* out, long keys, ProductRows latents, int first,
                                int thread_index, constant ExpandParameters& p) {
  for (int i = thread_index; i < kExpandRows * p.rope; i += kAttendThreads) {
    const int row = first + i / p.rope;
    const int feature = i % p.rope;
    if (row >= latents.rows) continue;
    const float value =
        LoadCacheElement(latents.data, input_type, row * latents.stride + p.latent + feature);
    StoreElement(out, output_type, keys + row * long(p.nope + p.rope) + p.nope + feature, value);
  }
}

[[kernel]] void latent_expand(device const uchar* key_weights [[buffer(MARLIN_BUFFER_KEY_WEIGHTS)]],
                              device const uchar* value_weights
                              [[buffer(MARLIN_BUFFER_VALUE_WEIGHTS)]],
                              device uchar* out [[buffer(MARLIN_BUFFER_PRODUCT_OUT)]],
                              device const int* pages [[buffer(MARLIN_BUFFER_LATENT_PAGES)]],
                              device const int* tokens [[buffer(MARLIN_BUFFER_LATENT_TOKENS)]],
                              device int4* report [[buffer(MARLIN_BUFFER_ROW_ERROR)]],
                              constant ExpandParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              ushort simdgroup [[simdgroup_index_in_threadgroup]],
                              ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup uint least[kAttendSimdgroups];
  const int thread_index = simdgroup * kLanes + lane;
  if (p.checks && group.x == 0 && group.y == 0 && group.z == 0) {
    CheckLatents(least, pages, tokens, report, thread_index, p.pages);
  }
  const int index = p.first_page + int(group.z) / p.row_tiles;
  const int first_row = int(group.z) % p.row_tiles * kExpandRows;
  const int rows = min(tokens[index], p.pages.page_tokens);
  device const uchar* const page = PageOf(pages[index], CacheElementBytes(input_type), p.pages);
  if (page == nullptr || first_row >= rows) return;

  const ProductRows latents = {page, p.latent + p.rope, rows, p.latent};
  const long head = group.y;
  const bool of_keys = int(group.x) < p.key_blocks;
  const int key_dim = p.nope + p.rope;
  const long first = index * p.page_stride + p.first_element;
  const long keys = first + head * p.pages.page_tokens * key_dim;
  const long values = first + long(p.heads) * p.pages.page_tokens * key_dim +
                      head * p.pages.page_tokens * p.value_dim;
  if (group.x == 0) CopyRope(out, keys, latents, first_row, thread_index, p);

  const int block = of_keys ? int(group.x) : int(group.x) - p.key_blocks;
  const int first_output = block * kProductOutputs + simdgroup * kSide;
  const int outputs = of_keys ? p.nope : p.value_dim;
  if (first_output >= outputs) return;
  const ProductWeights of_key = {
      key_weights + head * p.key_weight_head_stride * CacheElementBytes(key_type), key_type,
      p.key_weight_stride, p.nope, true};
  const ProductWeights of_value = {
      value_weights + head * p.value_weight_head_stride * CacheElementBytes(value_type), value_type,
      p.value_weight_stride, p.value_dim, false};
  ProductSums<kExpandRows / kSide> sums;
  if (of_keys) {
    MultiplyHead<kExpandRows / kSide>(sums, latents, first_row, of_key, first_output, lane);
  } else {
    MultiplyHead<kExpandRows / kSide>(sums, latents, first_row, of_value, first_output, lane);
  }
  const ProductTarget target = {out, of_keys ? keys : values, of_keys ? key_dim : p.value_dim, rows,
                                outputs};
  StoreProducts<kExpandRows / kSide>(sums, target, first_row, first_output, lane);
}
