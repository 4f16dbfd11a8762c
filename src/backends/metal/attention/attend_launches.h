// The launches of attention: which kernels run a call, their grids and parameters.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

#include "backends/metal/decoder/operations.h"
#include "backends/metal/kernels/attention/attend_parameters.h"
#include "backends/metal/runtime/driver.h"
#include "marlin/decoder.h"

namespace marlin::metal {

/// Attention over a paged cache, or over the keys and values of one sequence.
struct AttendOperands {
  TensorView queries;  ///< [rows, heads, key_dim]
  MutableTensorView out;
  const AttentionOptions& options;
  TensorView keys = {};  ///< One sequence's, as `values`.
  TensorView values = {};
  const SequenceRows* rows = nullptr;  ///< A paged cache's, as `cache`.
  const PagedCache* cache = nullptr;

  bool paged() const { return cache != nullptr; }
  int64_t kv_heads() const { return paged() ? cache->kv_heads : keys.dim(1); }
  int64_t group() const { return queries.dim(1) / kv_heads(); }
  int64_t sequences() const { return paged() ? rows->first_rows.dim(0) - 1 : 1; }
  /// Keys that there is room for.
  int64_t most_length() const {
    return paged() ? rows->block_tables.dim(1) * cache->page_tokens : keys.dim(0);
  }
};

/// Whether the kernels take the sizes; if not, the host does.
bool TakesAttention(const AttendOperands& operands);

/// Bytes of the sums of segments.
int64_t AttendWorkspaceBytes(const AttendOperands& operands, const DeviceShape& shape);

/// Appends the launches. Precondition: TakesAttention. Errors: kInvalidArgument (slabs that are not
/// the device's memory), kOutOfMemory.
Status LaunchAttention(const AttendOperands& operands, CallContext* context);

/// Describes the rows, pages and slabs of a paged cache, and where heads are in a page. Errors:
/// kInvalidArgument for slabs that are not the device's memory.
Status SetPages(const SequenceRows& rows, const PagedCache& cache, const Driver& driver,
                kernels::AttendParameters* p);

/// attend_H_D: H query heads of a row at a time, of up to D features. attend_tile_D: without heads.
struct AttendKernel {
  std::string_view function;
  int64_t heads = 0;
  int64_t features = 0;
};

/// The grid of a kernel.
struct AttendPlan {
  AttendKernel kernel;
  int64_t indices = 0;           ///< Rows, or places for rows.
  int64_t rows_of_sequence = 0;  ///< As in kernels::AttendParameters.
  int64_t least_tokens = 1;
  int64_t most_tokens = std::numeric_limits<int32_t>::max();
  int64_t indices_of_launch = 0;  ///< Indices of every launch but the last.
  int64_t head_parts = 1;
  int64_t segments = 1;  ///< Threadgroups of a row and head.
  int64_t sums_bytes = 0;
  int64_t merged_rows = 0;  ///< In the grid of attend_merge.
};

/// Tokens of a sequence in a call from which on attend_tile_D has its rows; fewer of wide heads.
inline constexpr int64_t kLeastTileTokens = 5;

/// Empty: the kernel has no part in the call.
struct AttendPlans {
  AttendPlan single;  ///< attend_H_D
  AttendPlan tiles;   ///< attend_tile_D: indices are tiles.
};

AttendPlans PlanAttend(const AttendOperands& operands, const DeviceShape& shape);

}  // namespace marlin::metal
