#include "backends/cuda/variants.h"

#include <algorithm>
#include <span>
#include <string_view>

#include "backends/cuda/code_kind.h"
#include "backends/cuda/wgmma_plan.h"
#include "layout/weights_shapes.h"

namespace marlin::cuda {
namespace {

/// One kernel that cuts problems in several ways. Another is one more row of kCutters.
struct Cutter {
  std::string_view kernel;
  std::span<const int> widths;  ///< Ascending.
  int most_splits;
  KernelVariant (*choose)(const TileProblem& problem, const DeviceShape& device);
  bool (*can_run)(const TileProblem& problem, const DeviceShape& device,
                  const KernelVariant& variant);
};

KernelVariant ChooseWgmma(const TileProblem& problem, const DeviceShape& device) {
  const WgmmaShape shape = ChooseWgmmaShape(problem, device);
  return {shape.tokens, shape.splits};
}

bool CanRunWgmma(const TileProblem& problem, const DeviceShape& device,
                 const KernelVariant& variant) {
  return CanPlanWgmmaAs(problem, device, {variant.width, variant.splits});
}

constexpr Cutter kCutters[] = {
    {"marlin_gemm_wgmma", kWgmmaWidths, kMaxSplits, ChooseWgmma, CanRunWgmma},
};

const Cutter* CutterOf(const KernelDesc& kernel, const GemmDesc& desc) {
  if (desc.m <= 0 || desc.n <= 0 || desc.k <= 0) return nullptr;
  for (const Cutter& cutter : kCutters) {
    if (cutter.kernel == kernel.name) return &cutter;
  }
  return nullptr;
}

int TileBytesOf(const GemmDesc& desc) {
  const int bits = CodeBits(KindOf(desc.format));
  if (!GetFormatInfo(desc.format).quantized) return TileCodeBytes(bits);
  const auto groups = static_cast<int>(kTileK / SharedScaleRun(desc.group_size, desc.k, kTileK));
  return TileCodeBytes(bits) + groups * kGroupBytes * (desc.has_zeros || desc.has_biases ? 2 : 1);
}

bool HasNarrowCodes(const GemmDesc& desc) {
  const int bits = CodeBits(KindOf(desc.format));
  return bits <= 4 && TileBytesOf(desc) == TileCodeBytes(bits) + kGroupBytes;
}

}  // namespace

TileProblem ProblemOf(const GemmDesc& desc) {
  TileProblem problem;
  problem.m = static_cast<int>(desc.m);
  problem.n = static_cast<int>(desc.n);
  problem.k = static_cast<int>(desc.k);
  problem.gated = desc.gated;
  problem.batch_invariant = desc.determinism == Determinism::kBatchInvariant;
  problem.tile_bytes = TileBytesOf(desc);
  problem.pair_table = KindOf(desc.format) == CodeKind::kTable4;
  problem.narrow_codes = HasNarrowCodes(desc);
  return problem;
}

std::vector<KernelVariant> VariantsOf(const KernelDesc& kernel, const GemmDesc& desc,
                                      const DeviceShape& device) {
  const Cutter* const cutter = CutterOf(kernel, desc);
  if (cutter == nullptr) return {};
  const TileProblem problem = ProblemOf(desc);
  std::vector<KernelVariant> variants = {cutter->choose(problem, device)};
  for (const int width : cutter->widths) {
    // Wider tiles that are half empty or more only cost more.
    if (width > cutter->widths.front() && width / 2 >= desc.m) break;
    for (int splits = 1; splits <= cutter->most_splits; ++splits) {
      const KernelVariant variant = {width, splits};
      if (variant == variants.front() || !cutter->can_run(problem, device, variant)) continue;
      variants.push_back(variant);
    }
  }
  return variants;
}

bool CanRunAs(const KernelDesc& kernel, const GemmDesc& desc, const DeviceShape& device,
              const KernelVariant& variant) {
  const Cutter* const cutter = CutterOf(kernel, desc);
  return cutter != nullptr && cutter->can_run(ProblemOf(desc), device, variant);
}

}  // namespace marlin::cuda
