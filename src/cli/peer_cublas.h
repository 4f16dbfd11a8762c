// cuBLAS as a peer in benchmarks.
#pragma once

#include <memory>
#include <string>

#include "cli/dense_peer.h"
#include "marlin/device.h"
#include "marlin/status.h"

namespace marlin::cli {

/// Makes a handle on the calling thread's current device (cublas_library.h says where the library
/// is looked for). The peer's bf16 product is the one that PyTorch runs. `version` is cuBLAS's,
/// such as "13.1.0". Errors: kUnsupported when it is not there, kDeviceLost, kOutOfMemory.
struct CublasPeer {
  DensePeer peer;
  std::string version;
};
Result<CublasPeer> LoadCublas(const Device& device);

}  // namespace marlin::cli
