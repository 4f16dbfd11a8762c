// The caller's memory that a launch reaches through addresses: checked in place. Must not know
// threads or how accesses are reported.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <vector>

#include "metal_sim/device_memory.h"
#include "metal_sim/launch.h"

namespace metal_sim {

class AddressedMemory {
 public:
  /// `check`: what is written gets shadow memory. Errors: kOutOfMemory.
  Status Place(const std::vector<AddressedRange>& ranges, bool check);

  /// The piece that holds an address, or null. Pieces that touch differ in whether they are
  /// written.
  DeviceBuffer* Holding(uintptr_t address) {
    const auto after = std::upper_bound(
        pieces_.begin(), pieces_.end(), address,
        [](uintptr_t value, const DeviceBuffer& piece) { return value < piece.begin(); });
    if (after == pieces_.begin()) return nullptr;
    DeviceBuffer& piece = *std::prev(after);
    return address - piece.begin() < piece.bytes ? &piece : nullptr;
  }
  const std::vector<DeviceBuffer>& pieces() const { return pieces_; }

 private:
  std::vector<DeviceBuffer> pieces_;  ///< By address.
  std::deque<ShadowMemory> shadows_;
};

/// Cuts ranges at each other's ends: pieces that do not overlap, by address; empty ones are left
/// out.
std::vector<AddressedRange> CutRanges(const std::vector<AddressedRange>& ranges);

}  // namespace metal_sim
