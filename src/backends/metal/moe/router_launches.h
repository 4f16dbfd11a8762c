// The launches of routers, and what their error words say: pure functions of the call.
#pragma once

#include <cstdint>

#include "backends/metal/runtime/driver.h"
#include "marlin/moe.h"
#include "plan/step/decoder_calls.h"

namespace marlin::metal {

/// Rows [first, first + count) of a call.
struct RouterRows {
  int64_t first = 0;
  int64_t count = 0;
};

/// The most rows whose keys fit into an error word.
int64_t MostRouterRows(int64_t experts);

/// Selection from logits. Precondition: Takes.
KernelLaunch RouteTokensLaunch(const RouteTokensCall& call, const RouterRows& rows, void* error,
                               int64_t error_bytes);

/// Product and selection. Precondition: RoutesRows.
KernelLaunch RouteRowsLaunch(const RouteRowsCall& call, const RouterRows& rows, void* error,
                             int64_t error_bytes);

/// The initial value of an error word.
inline constexpr uint32_t kNoRouterError = 0xffffffff;

/// The error of a launch's least key (kernels/router_parameters.h).
Status RouterError(uint32_t key, const RouterRows& rows, int64_t experts);

}  // namespace marlin::metal
