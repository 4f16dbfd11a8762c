// The memory of KV cache pages: slabs on the device, and which of their pages are free.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "marlin/decoder.h"
#include "marlin/device.h"
#include "marlin/recurrent.h"
#include "marlin/status.h"
#include "model/decoder_config.h"
#include "recipe/mixer.h"

namespace marlin {

/// The state that a sequence keeps of one layer, and how far back the layer sees (0: to the
/// beginning).
struct LayerState {
  MixerState kept;
  int64_t window = 0;
  int64_t source = -1;   ///< The layer whose pages it reads, with nothing kept of its own; or -1.
  bool on_host = false;  ///< Kept in the memory of CacheShape::host.
  friend bool operator==(const LayerState&, const LayerState&) = default;
};

/// The sizes that determine a cache's memory.
struct CacheShape {
  std::vector<LayerState> layers;
  DType type = DType::kF32;
  int64_t most_bytes = INT64_MAX;             ///< All pages on the device together, at most.
  std::optional<Device> host = std::nullopt;  ///< Keeps some layers.

  static CacheShape Of(const DecoderConfig& config, DType type);
  /// Keeps the first `count` layers on the host.
  void PutOnHost(const Device& device, int64_t count);
};

/// The slabs of all KV cache groups: layers with the same state and window, whose pages hold the
/// same positions for all of them. A page of a recurrent group holds the states of all its layers
/// after some token. Not thread-safe, apart from what never changes: the sizes.
class PageMemory {
 public:
  /// Pages have tokens for both devices. Errors: kUnsupported for a device without KV caches.
  static Result<PageMemory> Make(const Device& device, const CacheShape& shape);

  int64_t page_tokens() const { return page_tokens_; }
  size_t groups() const { return groups_.size(); }
  size_t GroupOf(int64_t layer) const { return places_[static_cast<size_t>(layer)].group; }
  int64_t WindowOf(size_t group) const { return groups_[group].state.window; }
  bool IsRecurrent(size_t group) const { return groups_[group].state.kept.fixed > 0; }
  int64_t PageBytes(size_t group) const { return groups_[group].page_bytes; }
  int64_t FirstLayerOf(size_t group) const;
  /// Groups that are not recurrent.
  int64_t TokenGroups() const;
  int64_t MostPages() const;
  int64_t most_bytes() const { return most_bytes_; }
  /// Precondition: the layer's group is not recurrent.
  PagedCache CacheOf(int64_t layer, std::span<void* const> slabs) const;
  /// Precondition: the layer's group is recurrent.
  RecurrentStates StatesOf(int64_t layer, std::span<void* const> slabs) const;

  /// Allocated slabs on the device.
  int64_t bytes() const { return bytes_; }
  std::vector<void*> Slabs(size_t group) const;
  /// The pages of a group's slabs; page numbers are less.
  size_t PagesOf(size_t group) const;
  bool HasFree(size_t group) const { return !groups_[group].free.empty(); }
  /// Precondition: HasFree.
  int32_t Take(size_t group);
  void Return(size_t group, int32_t page);
  /// Gets a group free pages. Errors: kOutOfMemory.
  Status AddSlab(size_t group);
  /// Frees the slabs of all groups without a page in use; returns whether there was one.
  bool FreeUnusedSlabs();

 private:
  struct Slab {
    DeviceBuffer memory;  ///< No bytes: not allocated.
    int64_t used = 0;     ///< Pages that are taken.
  };
  struct Group {
    LayerState state;
    PagedCache layout;          ///< Any layer's, without its slabs and offset.
    int64_t part_elements = 0;  ///< One layer's share of a page.
    int64_t layers = 0;
    int64_t slab_pages = 1;
    int64_t page_bytes = 0;
    std::vector<Slab> slabs;
    std::vector<int32_t> free;  ///< Pages.
    int64_t used = 0;           ///< Pages that are taken.
    int64_t unused_slabs = 0;   ///< Allocated, but without a page in use.
  };
  struct Place {
    size_t group;
    int64_t index;  ///< Index among the layers of the group.
  };

  PageMemory(const Device& device, const std::optional<Device>& host)
      : device_(device), host_(host) {}
  const Device& DeviceOf(const Group& group) const {
    return group.state.on_host ? *host_ : device_;
  }
  Place AddLayer(const LayerState& state);
  static bool IsUnused(const Slab& slab) { return slab.used == 0 && slab.memory.bytes() > 0; }
  /// The pages of a slab of a group.
  int64_t SlabPages(const Group& group) const;
  void FreeSlab(Group* group, size_t slab);

  Device device_;
  std::optional<Device> host_;
  DType type_ = DType::kF32;
  int64_t page_tokens_ = 0;
  std::vector<Place> places_;  ///< One per layer.
  int64_t most_bytes_ = INT64_MAX;
  std::vector<Group> groups_;
  int64_t bytes_ = 0;
};

}  // namespace marlin
