// HeadProduct and ExpandLatents as launches (kernels/head_product.metal).
#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "backends/metal/attention/launch_buffers.h"
#include "backends/metal/attention/row_report.h"
#include "backends/metal/decoder/operations.h"
#include "backends/metal/gemm/row_parts.h"
#include "backends/metal/gemm/strip_layout.h"
#include "backends/metal/kernels/attention/head_product_parameters.h"
#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

/// Rows of head_product_8 and of head_product_32, and up to which the first one is used.
constexpr int64_t kFewRows = 8;
constexpr int64_t kManyRows = 32;
/// Weights are read once per tile of rows: assume half of a GEMM's operations per second.
constexpr int64_t kMostProductOperations = kMostOperationsOfPart / 2;

uint32_t BlocksOf(int64_t outputs) {
  return static_cast<uint32_t>(CeilDivide(outputs, int64_t{kernels::kProductOutputs}));
}

/// Planes of the grid that one launch takes.
int64_t PlanesOfLaunch(int64_t planes, int64_t operations_of_plane) {
  return std::clamp<int64_t>(kMostProductOperations / std::max<int64_t>(operations_of_plane, 1), 1,
                             std::max<int64_t>(planes, 1));
}

}  // namespace

bool Takes(const HeadProductCall& call, const DeviceShape& shape) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const KernelBuffer out = BufferOf(MARLIN_BUFFER_PRODUCT_OUT, call.out);
  return shape.known_fragments && call.x.dim(0) < kMost && call.x.dim(2) < kMost &&
         call.out.dim(2) < kMost && !Overlap(out, BufferOf(0, call.x)) &&
         !Overlap(out, BufferOf(0, call.weights));
}

Status Launch(const HeadProductCall& call, CallContext* context) {
  const int64_t rows = call.x.dim(0);
  const int64_t heads = call.x.dim(1);
  const bool few = rows <= kFewRows;
  const int64_t tile_rows = few ? kFewRows : kManyRows;
  const int64_t tiles = CeilDivide(rows, tile_rows);
  const int64_t most =
      PlanesOfLaunch(tiles, 2 * tile_rows * heads * call.x.dim(2) * call.out.dim(2));
  kernels::HeadProductParameters p{};
  p.input_stride = call.x.stride(0);
  p.input_head_stride = call.x.stride(1);
  p.weight_stride = call.weights.stride(1);
  p.weight_head_stride = call.weights.stride(0);
  p.out_stride = call.out.stride(0);
  p.out_head_stride = call.out.stride(1);
  p.rows = static_cast<int32_t>(rows);
  p.inputs = static_cast<int32_t>(call.x.dim(2));
  p.outputs = static_cast<int32_t>(call.out.dim(2));
  for (int64_t first = 0; first < tiles; first += most) {
    p.first_tile = static_cast<int32_t>(first);
    KernelLaunch launch;
    launch.source = "head_product.metal";
    launch.function = few ? "head_product_8" : "head_product_32";
    launch.threads = kernels::kAttendThreads;
    launch.threadgroups = {BlocksOf(call.out.dim(2)), static_cast<uint32_t>(heads),
                           static_cast<uint32_t>(std::min(most, tiles - first))};
    launch.constants[MARLIN_CONSTANT_INPUT_TYPE] = ElementTypeOf(call.x.dtype());
    launch.constants[MARLIN_CONSTANT_ALIGNED_INPUT] = QuadsAligned(call.x) ? 1 : 0;
    launch.constants[MARLIN_CONSTANT_KEY_TYPE] = ElementTypeOf(call.weights.dtype());
    launch.constants[MARLIN_CONSTANT_ALIGNED_KEYS] = QuadsAligned(call.weights) ? 1 : 0;
    launch.constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(call.out.dtype());
    launch.other_parameters = ParameterBlock(p);
    launch.buffers = {BufferOf(MARLIN_BUFFER_PRODUCT_INPUT, call.x),
                      BufferOf(MARLIN_BUFFER_KEY_WEIGHTS, call.weights),
                      Written(BufferOf(MARLIN_BUFFER_PRODUCT_OUT, call.out))};
    context->launches.push_back(launch);
  }
  return Status();
}

bool Takes(const ExpandLatentsCall& call, const DeviceShape& shape) {
  return shape.known_fragments && TakesSlabs(call.latents);
}

namespace {

kernels::ExpandParameters ExpandParametersOf(const ExpandLatentsCall& call) {
  kernels::ExpandParameters p{};
  const PagedCache& heads = call.heads;
  p.key_weight_stride = call.key_weights.stride(1);
  p.key_weight_head_stride = call.key_weights.stride(0);
  p.value_weight_stride = call.value_weights.stride(1);
  p.value_weight_head_stride = call.value_weights.stride(0);
  p.page_stride = heads.page_stride;
  p.first_element = heads.first_element;
  p.heads = static_cast<int32_t>(heads.kv_heads);
  p.latent = static_cast<int32_t>(call.latents.value_dim);
  p.rope = static_cast<int32_t>(call.latents.key_dim - call.latents.value_dim);
  p.nope = static_cast<int32_t>(call.key_weights.dim(2));
  p.value_dim = static_cast<int32_t>(heads.value_dim);
  // The first threadgroup copies the RoPE part, so that there is one in any case.
  p.key_blocks = std::max<int32_t>(static_cast<int32_t>(BlocksOf(p.nope)), 1);
  p.row_tiles =
      static_cast<int32_t>(CeilDivide(call.latents.page_tokens, int64_t{kernels::kExpandRows}));
  p.pages.rows = static_cast<int32_t>(call.pages.dim(0));
  return p;
}

Status LatentReportError(const ErrorWords::Word& report, int64_t page_tokens) {
  const int32_t place = report.more[0];
  if (report.selection == kernels::kNoLatentPage) {
    return Invalid(fmt::format("pages: no page {} at {}", report.id, place));
  }
  return Invalid(
      fmt::format("tokens: expected 0 to {}, got {} at {}", page_tokens, report.id, place));
}

bool LatentsAligned(const PagedCache& latents) {
  return latents.key_dim % 4 == 0 && latents.value_dim % 4 == 0 &&
         std::ranges::all_of(latents.slabs, [&](const void* slab) {
           return QuadsAligned(slab, latents.type, {latents.page_stride, latents.first_element});
         });
}

KernelLaunch ExpandLaunch(const ExpandLatentsCall& call) {
  KernelLaunch launch;
  launch.source = "head_product.metal";
  launch.function = "latent_expand";
  launch.threads = kernels::kAttendThreads;
  launch.constants[MARLIN_CONSTANT_INPUT_TYPE] = ElementTypeOf(call.latents.type);
  launch.constants[MARLIN_CONSTANT_ALIGNED_INPUT] = LatentsAligned(call.latents) ? 1 : 0;
  launch.constants[MARLIN_CONSTANT_KEY_TYPE] = ElementTypeOf(call.key_weights.dtype());
  launch.constants[MARLIN_CONSTANT_VALUE_TYPE] = ElementTypeOf(call.value_weights.dtype());
  launch.constants[MARLIN_CONSTANT_ALIGNED_KEYS] = QuadsAligned(call.value_weights) ? 1 : 0;
  launch.constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(call.heads.type);
  const PagedCache& heads = call.heads;
  launch.buffers = {BufferOf(MARLIN_BUFFER_KEY_WEIGHTS, call.key_weights),
                    BufferOf(MARLIN_BUFFER_VALUE_WEIGHTS, call.value_weights),
                    Written({MARLIN_BUFFER_PRODUCT_OUT, heads.slabs[0],
                             heads.slab_pages * heads.page_stride * DTypeBytes(heads.type)}),
                    BufferOf(MARLIN_BUFFER_LATENT_PAGES, call.pages),
                    BufferOf(MARLIN_BUFFER_LATENT_TOKENS, call.tokens)};
  AddressSlabs(call.latents, &launch);
  return launch;
}

}  // namespace

Status Launch(const ExpandLatentsCall& call, CallContext* context) {
  kernels::ExpandParameters p = ExpandParametersOf(call);
  MARLIN_RETURN_IF_ERROR(SetSlabs(call.latents, context->driver, &p.pages));
  const int64_t pages = call.pages.dim(0);
  const int64_t most = PlanesOfLaunch(
      pages, 2 * call.latents.page_tokens * p.heads * p.latent * (int64_t{p.nope} + p.value_dim));
  for (int64_t first = 0; first < pages; first += most) {
    p.first_page = static_cast<int32_t>(first);
    p.checks = first == 0 ? 1 : 0;
    KernelLaunch launch = ExpandLaunch(call);
    launch.other_parameters = ParameterBlock(p);
    launch.threadgroups = {static_cast<uint32_t>(p.key_blocks) + BlocksOf(p.value_dim),
                           static_cast<uint32_t>(p.heads),
                           static_cast<uint32_t>(std::min(most, pages - first) * p.row_tiles)};
    const int64_t page_tokens = call.latents.page_tokens;
    MARLIN_RETURN_IF_ERROR(BindReport(
        p.checks != 0,
        [page_tokens](const ErrorWords::Word& report) {
          return LatentReportError(report, page_tokens);
        },
        context, &launch));
    context->launches.push_back(std::move(launch));
  }
  return Status();
}

}  // namespace marlin::metal
