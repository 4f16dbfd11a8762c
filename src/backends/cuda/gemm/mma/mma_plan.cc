#include "backends/cuda/gemm/mma/mma_plan.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <vector>

#include "backends/cuda/plan/kernel_family.h"

namespace marlin::cuda {
namespace {

/// Products of bf16 that a multiprocessor adds per cycle with mma.sync: known by its shared memory,
/// because 8.6 runs the code of 8.0, and Hopper may.
double ProductsOf(const DeviceShape& device) {
  if (device.shared_bytes < 128 * 1024) return 512;   // 8.6, 8.9, 12.0
  if (device.shared_bytes < 192 * 1024) return 1024;  // 8.0
  return 1270;                                        // 9.0, of 2048 with wgmma
}

/// Bytes of device memory per cycle of a multiprocessor.
double MemoryBytesOf(const DeviceShape& device) {
  constexpr double kReached = 0.85;  ///< Part of the peak that kernels reach.
  const DeviceRates known;           // An H200's.
  const DeviceRates& rates = device.rates;
  const bool is_known = rates.gigabytes > 0 && rates.megahertz > 0;
  const DeviceRates& of = is_known ? rates : known;
  return kReached * 1e3 * of.gigabytes / (of.megahertz * device.multiprocessors);
}

/// Bytes per cycle that a multiprocessor reads from L2, and from shared memory.
constexpr double kL2Bytes = 40;
constexpr double kSharedBytes = 128;
/// Cycles from a copy's request to its arrival.
constexpr double kMemoryLatency = 1200;

/// Registers per thread of the kernels, at most.
int RegistersOf(int tokens) { return tokens <= 32 ? 128 : tokens <= 64 ? 168 : 255; }

/// CTAs of 32 x `warps` threads per multiprocessor that registers allow.
int MostResident(int tokens, int warps) { return 65536 / (RegistersOf(tokens) * warps * 32); }

/// Whether the gates and ups of an n-tile are in different n-tiles of the weights; otherwise their
/// sums meet in the workspace.
bool StripsPair(const TileProblem& problem) { return problem.n % (2 * kStripOutputs) == 0; }

bool UpsApart(const TileProblem& problem) { return problem.gated && !StripsPair(problem); }

int MmaBlocks(const TileProblem& problem, int warps) {
  return problem.gated && StripsPair(problem)
             ? Ceil(problem.n / 2, int64_t{warps} / 2 * kStripOutputs)
             : Ceil(problem.n, int64_t{warps} * kStripOutputs);
}

}  // namespace

MmaFit FitMma(const DeviceShape& device, int tile_bytes, int tokens, int warps, int resident) {
  constexpr int kReserved = 1024;  ///< By the system, for every CTA.
  if (resident > MostResident(tokens, warps)) return {};
  const int budget = (device.shared_bytes + kReserved) / resident - kReserved;
  const int stages =
      std::min(budget / MmaStages{1, warps, tile_bytes}.Bytes(tokens), kMostMmaStages);
  if (stages < 2 || MmaExchangeBytes(warps) > budget) return {};
  return {warps, stages, resident};
}

MmaFit FitMma(const DeviceShape& device, int tile_bytes, int tokens, int warps) {
  constexpr int kEnough = 3;  ///< Stages that are worth more than another CTA.
  for (int resident = MostResident(tokens, warps); resident > 1; --resident) {
    const MmaFit fit = FitMma(device, tile_bytes, tokens, warps, resident);
    if (fit.stages >= kEnough) return fit;
  }
  return FitMma(device, tile_bytes, tokens, warps, 1);
}

double MmaStepCycles(const TileProblem& problem, const DeviceShape& device, const MmaFit& fit,
                     int tokens) {
  // Instructions of a warp, counted in the compiled kernels.
  const double fixed = (problem.sparse ? 330.0 : 500.0) + (problem.pair_table ? 250.0 : 0.0);
  const double per_token = problem.sparse ? 2.5 : 3.4;
  // Warps of one of the four parts of a multiprocessor: alone, one waits for most of its time.
  const double warps = fit.warps / 4.0;
  constexpr double kAlone = 0.45;
  constexpr double kTogether = 0.75;
  const double rate = std::min(kAlone * warps * fit.resident, kTogether);
  const double issue = warps * (fixed + per_token * tokens) / rate;

  constexpr double kReached = 0.9;  ///< Part of the rate of MMAs that kernels reach.
  const double rows = kStripOutputs * (problem.sparse ? 0.5 : 1.0);
  const double products = fit.warps * rows * kTileK * tokens / (kReached * ProductsOf(device));
  const double weights = double{1} * fit.warps * problem.tile_bytes;
  const double activations = double{1} * tokens * kTokenBytes;
  const double read = fit.warps * activations / kSharedBytes;
  const double compute = std::max({issue, products, read});
  // Other CTAs hide the barrier and the latency of copies.
  constexpr double kBarrier = 250;
  const double alone = std::max(compute + kBarrier, kMemoryLatency / (fit.stages - 1));
  return std::max({compute, (weights + activations) / kL2Bytes, alone / fit.resident});
}

double MmaCyclesPerMicrosecond(const DeviceShape& device) {
  return device.rates.megahertz > 0 ? device.rates.megahertz : DeviceRates().megahertz;
}

namespace {

bool CanSplitMma(const TileProblem& problem, const DeviceShape& device, const MmaFit& fit,
                 int64_t items, int splits) {
  constexpr int kLeastTiles = 4;
  return !problem.batch_invariant && splits <= kMaxSplits &&
         Ceil(problem.k, kTileK) >= splits * kLeastTiles &&
         items * splits <= int64_t{device.multiprocessors} * fit.resident;
}

int64_t MmaItems(const TileProblem& problem, int tokens, int warps) {
  return int64_t{Ceil(problem.m, tokens)} * MmaBlocks(problem, warps);
}

double MmaCycles(const TileProblem& problem, const DeviceShape& device, const MmaFit& fit,
                 const MmaShape& shape) {
  constexpr double kLaunch = 3000;  ///< Until the first tile has arrived, and the epilogue's start.
  constexpr double kMeeting = 2500;
  const int64_t ctas = MmaItems(problem, shape.tokens, fit.warps) * shape.splits;
  const int tiles = Ceil(Ceil(problem.k, kTileK), shape.splits);
  const int of_sm = Ceil(ctas, device.multiprocessors);
  const double outputs = double{1} * shape.tokens * fit.warps * kStripOutputs;
  // Where all CTAs run at once, those that share a multiprocessor share its rates.
  MmaFit at_once = fit;
  at_once.resident = std::min(of_sm, fit.resident);
  const double item = kLaunch / at_once.resident + outputs * 0.1;
  const double work =
      of_sm * (tiles * MmaStepCycles(problem, device, at_once, shape.tokens) + item);
  const double bytes =
      double{1} * Ceil(problem.n, kStripOutputs) * Ceil(problem.k, kTileK) * problem.tile_bytes;
  const double memory = bytes / (MemoryBytesOf(device) * device.multiprocessors);
  double cycles = std::max(work, memory + kLaunch);
  if (shape.splits > 1) {
    cycles += kMeeting + 2.0 * sizeof(float) * outputs * shape.splits / kL2Bytes;
  }
  return cycles;
}

/// The warps of the fastest CTAs of a shape, if any are possible.
std::optional<MmaFit> FastestFit(const TileProblem& problem, const DeviceShape& device,
                                 const MmaShape& shape) {
  std::optional<MmaFit> best;
  double least = 0;
  for (const int warps : {4, kMostMmaWarps}) {
    const int64_t items = MmaItems(problem, shape.tokens, warps);
    for (int resident = MostResident(shape.tokens, warps); resident > 0; --resident) {
      const MmaFit fit = FitMma(device, problem.tile_bytes, shape.tokens, warps, resident);
      if (fit.stages == 0) continue;
      if (shape.splits > 1 && !CanSplitMma(problem, device, fit, items, shape.splits)) continue;
      const double cycles = MmaCycles(problem, device, fit, shape);
      if (best && cycles >= least) continue;
      least = cycles;
      best = fit;
    }
  }
  return best;
}

bool IsWidth(int tokens) {
  return std::find(std::begin(kMmaWidths), std::end(kMmaWidths), tokens) != std::end(kMmaWidths);
}

}  // namespace

bool CanPlanMmaAs(const TileProblem& problem, const DeviceShape& device, const MmaShape& shape) {
  return IsWidth(shape.tokens) && shape.splits > 0 &&
         FastestFit(problem, device, shape).has_value();
}

MmaPlan PlanMmaAs(const TileProblem& problem, const DeviceShape& device, const MmaShape& shape) {
  const MmaFit fit = *FastestFit(problem, device, shape);
  MmaPlan plan;
  MmaArguments& args = plan.arguments;
  plan.tokens = shape.tokens;
  plan.warps = fit.warps;
  plan.resident = fit.resident;
  plan.cycles = MmaCycles(problem, device, fit, shape);
  plan.partials = UpsApart(problem);
  args.tiles = Ceil(problem.k, kTileK);
  args.splits = shape.splits;
  args.tiles_base = args.tiles / args.splits;
  args.tiles_rest = args.tiles % args.splits;
  args.token_tiles = Ceil(problem.m, plan.tokens);
  args.blocks = MmaBlocks(problem, fit.warps);
  // The activations of a rasterization group stay in the L2 cache while all weights stream by.
  constexpr int kNeighbourTokens = 1024;
  args.neighbours = kNeighbourTokens / plan.tokens;
  if (problem.gated && !plan.partials) args.half_strips = problem.n / 2 / kStripOutputs;
  args.m = problem.m;
  args.k = problem.k;
  args.stages = fit.stages;
  plan.items = static_cast<int>(MmaItems(problem, plan.tokens, fit.warps));
  plan.shared_bytes =
      std::max(MmaStages{fit.stages, fit.warps, problem.tile_bytes}.Bytes(plan.tokens),
               MmaExchangeBytes(fit.warps));
  return plan;
}

namespace {

/// Whether a width's tiles are half empty or more, so that a smaller one costs less.
bool IsTooWide(const TileProblem& problem, int width) {
  return width > kMmaWidths[0] && width / 2 >= problem.m;
}

/// The splits of the fastest plan of a width, if it has one.
std::optional<MmaPlan> FastestOfWidth(const TileProblem& problem, const DeviceShape& device,
                                      int width) {
  std::optional<MmaPlan> best;
  for (int splits = 1; splits <= kMaxSplits; ++splits) {
    if (!CanPlanMmaAs(problem, device, {width, splits})) continue;
    const MmaPlan plan = PlanMmaAs(problem, device, {width, splits});
    if (!best || plan.cycles < best->cycles) best = plan;
  }
  return best;
}

}  // namespace

MmaPlan PlanMma(const TileProblem& problem, const DeviceShape& device) {
  // Wide tiles decode less and read less from L2, which saves power, and clocks rise with it.
  constexpr double kWideIsWorth = 1.04;
  std::vector<MmaPlan> plans;
  for (const int width : kMmaWidths) {
    if (IsTooWide(problem, width)) break;
    if (auto plan = FastestOfWidth(problem, device, width)) plans.push_back(*plan);
  }
  const double least = std::ranges::min(plans, {}, &MmaPlan::cycles).cycles;
  while (plans.back().cycles > kWideIsWorth * least) plans.pop_back();
  return plans.back();
}

namespace {

/// Far beyond any other kernel's estimate but the exact ones'.
constexpr double kNever = 1e11;

double MmaMicroseconds(const GemmDesc& desc, const DeviceShape& device) {
  // The WGMMA kernel takes the same problems in less time.
  if (device.has_wgmma) return kNever;
  // The GEMV kernel's estimates are not comparable: where it runs it is the faster one.
  constexpr double kUnfitted = 100;
  const TileProblem problem = TileProblemOf(desc);
  const double micros = PlanMma(problem, device).cycles / MmaCyclesPerMicrosecond(device);
  constexpr int kMostGemvRows = 16;
  return problem.m <= kMostGemvRows ? kUnfitted * micros : micros;
}

std::vector<KernelVariant> MmaVariants(const GemmDesc& desc, const DeviceShape& device) {
  const TileProblem problem = TileProblemOf(desc);
  const MmaPlan plan = PlanMma(problem, device);
  const MmaShape usual = {plan.tokens, plan.arguments.splits};
  std::vector<KernelVariant> variants = {{usual.tokens, usual.splits}};
  // Nothing to tune where another kernel is faster anyhow.
  if (device.has_wgmma) return variants;
  for (const int width : kMmaWidths) {
    if (IsTooWide(problem, width)) break;
    for (int splits = 1; splits <= kMaxSplits; ++splits) {
      const MmaShape shape = {width, splits};
      if (shape == usual || !CanPlanMmaAs(problem, device, shape)) continue;
      variants.push_back({width, splits});
    }
  }
  return variants;
}

bool CanRunMma(const GemmDesc& desc, const DeviceShape& device, const KernelVariant& variant) {
  return CanPlanMmaAs(TileProblemOf(desc), device, {variant.width, variant.splits});
}

}  // namespace

int64_t MmaCounterBytes(const MmaPlan& plan) {
  return RoundUp(int64_t{plan.items} * int64_t{sizeof(uint32_t)}, int64_t{256});
}

int64_t MmaWorkspaceBytes(const TileProblem& problem, const MmaPlan& plan) {
  if (plan.partials) return PartialBytes(problem, plan.arguments.splits);
  if (plan.arguments.splits == 1) return 0;
  const int64_t parts = int64_t{plan.items} * plan.arguments.splits;
  return MmaCounterBytes(plan) +
         parts * PartFloats(plan.tokens, plan.warps) * int64_t{sizeof(float)};
}

const KernelFamily& MmaFamily() {
  static constexpr KernelFamily kFamily = {
      .microseconds = MmaMicroseconds, .variants = MmaVariants, .can_run_as = CanRunMma};
  return kFamily;
}

Support SupportsMma(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  return SupportsTiles(desc);
}

Support SupportsSparseMma(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  return SupportsTiles(desc, true);
}

}  // namespace marlin::cuda
