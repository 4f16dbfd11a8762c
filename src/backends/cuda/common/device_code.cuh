// The instructions of the compute capability that is compiled for. A kernel with a part that one
// lacks asks with `if constexpr`; the host asks DeviceShape, which knows the code that runs.
#pragma once

namespace marlin::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
/// TMA, clusters, programmatic dependent launch.
inline constexpr bool kHasTma = false;
#else
inline constexpr bool kHasTma = true;
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
/// Conversions from and to e4m3 and e5m2.
inline constexpr bool kHasFp8 = false;
#else
inline constexpr bool kHasFp8 = true;
#endif

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
/// The asynchronous products of Hopper, 9.0a, which no later capability has.
inline constexpr bool kHasWgmma = false;
#else
inline constexpr bool kHasWgmma = true;
#endif

/// Bulk copies to all CTAs of a cluster; the assembler refuses them in code of 12.0.
inline constexpr bool kHasMulticast = kHasWgmma;

}  // namespace marlin::cuda
