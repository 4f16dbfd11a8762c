// Plain fp64 tensors.
#pragma once

#include "checkpoint/checkpoint_impl.h"

namespace marlin {

/// Makes plain fp64 tensors fp32 ones, computed from the file's: nothing here computes with
/// fp64. Values beyond fp32 become infinite, which loading and quantizing refuse. Directories of
/// this project are left alone, whose checksums are of the file's bytes.
void NarrowDoubles(Checkpoint::Impl* checkpoint);

}  // namespace marlin
