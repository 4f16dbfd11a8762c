#include "bench/read_probe.h"

#include <algorithm>

#include "backends/cpu/runtime/roofline.h"
#include "base/macros.h"
#include "base/thread_pool.h"
#include "marlin/device.h"
#include "ops/device/device.h"
#include "plan/gemm/backend.h"

namespace marlin::bench {

Result<double> MeasureReadBandwidth() {
  constexpr int kPasses = 9;
  constexpr int kStreams = 4;
  MARLIN_ASSIGN_OR_RETURN(const Device device, Device::Open("cpu"));
  ThreadPool pool(device.info().threads);
  MARLIN_ASSIGN_OR_RETURN(
      cpu::Roofline roofline,
      cpu::Roofline::Make(Internals::Impl(device).backend().Properties().level, pool));
  double best = roofline.ReadSeconds(kStreams);
  for (int pass = 1; pass < kPasses; ++pass) best = std::min(best, roofline.ReadSeconds(kStreams));
  return static_cast<double>(cpu::Roofline::kPassBytes) / best;
}

}  // namespace marlin::bench
