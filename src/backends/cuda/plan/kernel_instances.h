// The kernels of plan/instances.def by the kind of tiles that they read.
#pragma once

#include <bit>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// call(kind) with the kind as a constant, std::integral_constant.
template <CodeKind kFrom = CodeKind::kFp4, typename Call>
auto VisitKind(CodeKind kind, const Call& call) {
  if constexpr (kFrom != CodeKind::kDense16) {
    constexpr auto kNext = static_cast<CodeKind>(static_cast<int>(kFrom) + 1);
    if (kind != kFrom) return VisitKind<kNext>(kind, call);
  }
  return call(std::integral_constant<CodeKind, kFrom>());
}

class KindSet {
 public:
  constexpr KindSet(std::initializer_list<CodeKind> kinds) {
    for (const CodeKind kind : kinds) bits_ |= 1u << static_cast<int>(kind);
  }
  constexpr bool Has(CodeKind kind) const { return (bits_ >> static_cast<int>(kind) & 1) != 0; }
  constexpr int Count() const { return std::popcount(bits_); }

 private:
  uint32_t bits_ = 0;
};

/// Whether kinds have the order of CodeKind, which MARLIN_CUDA_KIND_BITS relies on.
constexpr bool AreInOrder(std::initializer_list<CodeKind> kinds) {
  int next = 0;
  for (const CodeKind kind : kinds) {
    if (static_cast<int>(kind) < next) return false;
    next = static_cast<int>(kind) + 1;
  }
  return true;
}

namespace kinds {
using enum CodeKind;
#define MARLIN_KINDS(name, ...)                  \
  inline constexpr KindSet name = {__VA_ARGS__}; \
  static_assert(AreInOrder({__VA_ARGS__}));
#define MARLIN_INSTANCES(...)
#define MARLIN_HOPPER_INSTANCES(...)
#include "backends/cuda/plan/instances.def"
#undef MARLIN_HOPPER_INSTANCES
#undef MARLIN_INSTANCES
#undef MARLIN_KINDS
static_assert(kAll.Count() == static_cast<int>(kDense16) + 1);
}  // namespace kinds

/// Whether this build has kernels for a kind (MARLIN_CUDA_KINDS of CMake).
constexpr bool IsBuilt([[maybe_unused]] CodeKind kind) {
#if defined(MARLIN_CUDA_KIND_BITS)
  return ((MARLIN_CUDA_KIND_BITS >> static_cast<int>(kind)) & 1) != 0;
#else
  return true;
#endif
}

/// Whether this build has Hopper's own kernels, of code for 9.0a.
constexpr bool IsHopperBuilt() {
#if defined(MARLIN_CUDA_HOPPER)
  return MARLIN_CUDA_HOPPER != 0;
#else
  return true;
#endif
}

/// The kinds of dense and of sparse tiles that a kernel is compiled for.
template <typename Kernels>
struct KindsOf;

#define MARLIN_KINDS(...)
#define MARLIN_KERNEL_ROW(kernel, dense, sparse, is_built) \
  struct kernel;                                           \
  template <>                                              \
  struct KindsOf<kernel> {                                 \
    static constexpr KindSet kDense = kinds::dense;        \
    static constexpr KindSet kSparse = kinds::sparse;      \
    static constexpr bool kIsBuilt = is_built;             \
  };
#define MARLIN_INSTANCES(kernel, header, dense, sparse) \
  MARLIN_KERNEL_ROW(kernel, dense, sparse, true)
#define MARLIN_HOPPER_INSTANCES(kernel, header, dense, sparse) \
  MARLIN_KERNEL_ROW(kernel, dense, sparse, IsHopperBuilt())
#include "backends/cuda/plan/instances.def"
#undef MARLIN_HOPPER_INSTANCES
#undef MARLIN_INSTANCES
#undef MARLIN_KERNEL_ROW
#undef MARLIN_KINDS

/// The function of a row of plan/instances.def for tiles of a kind, to pass to
/// cudaLaunchKernelExC. Null where the row has no such kind or this build none of its kernels
/// (MARLIN_CUDA_KINDS and CMAKE_CUDA_ARCHITECTURES).
template <typename Kernels>
const void* FunctionOf(TileKind tiles, const typename Kernels::Variant& variant) {
  return VisitKind(tiles.codes, [&](auto codes) -> const void* {
    constexpr CodeKind kKind = codes;
    constexpr bool kIsBuilt = IsBuilt(kKind) && KindsOf<Kernels>::kIsBuilt;
    if constexpr (kIsBuilt && KindsOf<Kernels>::kSparse.Has(kKind)) {
      if (tiles.sparse) return Kernels::template Function<TilesOfKind<kKind, true>>(variant);
    }
    if constexpr (kIsBuilt && KindsOf<Kernels>::kDense.Has(kKind)) {
      if (!tiles.sparse) return Kernels::template Function<TilesOfKind<kKind, false>>(variant);
    }
    return nullptr;
  });
}

}  // namespace marlin::cuda
