// The threadgroup memory of the resident threadgroups: an arena each, with red zones between the
// variables. Must not know threads or their accesses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "metal_sim/mapped_memory.h"
#include "metal_sim/shadow_cell.h"

namespace metal_sim {

struct ThreadgroupVariable {
  int id = 0;
  size_t offset = 0;  ///< In its arena.
  size_t bytes = 0;
  const char* name = "";
};

/// The memory of one threadgroup at a time. It begins as bytes 0xff, NaN in every float format,
/// so that a read before a write yields an unmistakable result.
class ThreadgroupArena {
 public:
  static constexpr size_t kBytes = size_t{1} << 20;

  ThreadgroupArena(std::byte* data, ShadowMemory shadow);

  /// Makes room for a variable. Returns null if there is none left. `name` must outlive the arena.
  void* Add(int id, size_t bytes, size_t alignment, const char* name);
  /// The variable's memory, or null if it was not added.
  void* Find(int id) const;
  /// Removes all variables, for the next threadgroup.
  void Clear();

  /// The variable at an offset below kBytes, or null: a red zone.
  const ThreadgroupVariable* VariableAt(size_t offset) const {
    const uint16_t number = owners_[offset / kGranule];
    return number == 0 ? nullptr : &variables_[number - 1U];
  }
  /// The variable that ends or begins closest to an offset, or null if there is none.
  const ThreadgroupVariable* NearestTo(size_t offset) const;

  uintptr_t begin() const { return reinterpret_cast<uintptr_t>(data_); }
  ShadowMemory& shadow() { return shadow_; }
  /// Bytes of the variables, each rounded up to 16 as Metal does.
  size_t variable_bytes() const { return variable_bytes_; }

 private:
  static constexpr size_t kGranule = 16;
  static constexpr size_t kRedZoneBytes = 256;

  std::byte* data_;
  ShadowMemory shadow_;
  size_t used_ = kRedZoneBytes;
  size_t variable_bytes_ = 0;
  std::vector<ThreadgroupVariable> variables_;
  std::vector<uint16_t> owners_;  ///< Per granule: 0, or 1 + the number of its variable.
};

/// All arenas, next to each other. Serves one launch after the other.
class ThreadgroupMemory {
 public:
  /// Makes sure that there are `arena_count` arenas, without variables. Errors: kOutOfMemory.
  Status Place(size_t arena_count);

  ThreadgroupArena& arena(size_t slot) { return arenas_[slot]; }
  bool Contains(uintptr_t address) const { return address - memory_.address() < memory_.size(); }

 private:
  MappedMemory memory_;
  std::vector<ThreadgroupArena> arenas_;
};

}  // namespace metal_sim
