// A launch with everything looked up that an encoder needs.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "backends/metal/apple/caller_memory.h"
#include "backends/metal/apple/compiled_kernels.h"
#include "backends/metal/apple/device_memory.h"
#include "backends/metal/apple/metal_cpp.h"
#include "backends/metal/runtime/driver.h"

namespace marlin::metal {

/// Memory that work in flight keeps: command buffers retain buffers, but neither the parts of them
/// nor what kernels reach through addresses.
struct UsedMemory {
  std::vector<std::shared_ptr<const BufferPart>> parts;
  std::vector<std::shared_ptr<const ReachedMemory>> reached;

  bool Has(const BufferPart* part) const;
};

struct BoundLaunch {
  struct Argument {
    MTL::Buffer* buffer = nullptr;
    NS::UInteger offset = 0;
    NS::UInteger index = 0;
  };

  std::string_view function;
  MTL::ComputePipelineState* pipeline = nullptr;
  std::vector<Argument> arguments;
  std::span<const std::byte> parameters;  ///< Empty: an argument has them.
  std::array<uint32_t, 3> threadgroups{};
  uint32_t threads = 0;
  int64_t operations = 0;
  bool after_barrier = false;  ///< In a recording: it begins when those before it have ended.
  /// Reached through addresses, and in no residency set.
  std::vector<const MTL::Resource*> read;
  std::vector<const MTL::Resource*> written;
  std::shared_ptr<const KernelLaunch> observed;  ///< For TheLaunchObserver; null without one.
};

/// Room for each absent buffer.
inline constexpr int64_t kUnreadBytes = 64;

/// The buffers that ranges are in.
struct ReachedBuffers final : ReachedMemory {
  using ReachedMemory::ReachedMemory;
  std::vector<std::shared_ptr<const BufferPart>> parts;
  std::vector<const MTL::Resource*> outside;  ///< Those in no residency set, once each.
};

/// Finds what launches need.
class LaunchBinder {
 public:
  /// `unread` is bound in place of absent buffers: kernels do not read it. `names_all`: the work is
  /// on a queue of the caller, whose other work Metal must order by the buffers that are written.
  LaunchBinder(CompiledKernels& kernels, const DeviceMemory& memory, const std::byte* unread,
               bool names_all)
      : kernels_(kernels), memory_(memory), unread_(unread), names_all_(names_all) {}

  /// The launch must outlive the result. Errors: as Driver::Run.
  Result<BoundLaunch> Bind(const KernelLaunch& launch, const CallerMemory& caller,
                           UsedMemory* used) const;

 private:
  Result<BufferPlace> PlaceOf(const KernelBuffer& buffer, const CallerMemory& caller) const;
  Status BindAddressed(const KernelLaunch& launch, UsedMemory* used, BoundLaunch* bound) const;

  CompiledKernels& kernels_;
  const DeviceMemory& memory_;
  const std::byte* const unread_;
  const bool names_all_;
};

}  // namespace marlin::metal
