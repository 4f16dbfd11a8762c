// cuBLAS as a peer in benchmarks, loaded at run time where it is installed.
#pragma once

#include <memory>
#include <string>

#include "cli/dense_peer.h"
#include "marlin/device.h"
#include "marlin/status.h"

namespace marlin::cli {

/// Loads libcublas and makes a handle on the calling thread's current device. Looked for, in this
/// order: in MARLIN_CUBLAS (files or folders between colons), by name, in the CUDA toolkit's usual
/// folder, and in the folders where Python keeps NVIDIA's wheels. The peer's bf16 product is the
/// one that PyTorch runs. `version` is cuBLAS's, such as "13.1.0". Errors: kUnsupported when it is
/// not there, kDeviceLost.
struct CublasPeer {
  DensePeer peer;
  std::string version;
};
Result<CublasPeer> LoadCublas(const Device& device);

}  // namespace marlin::cli
