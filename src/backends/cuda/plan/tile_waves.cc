#include "backends/cuda/plan/tile_waves.h"

#include <bit>

#include "base/checked.h"

namespace marlin::cuda {
namespace {

/// Fewest k-iterations per CTA for which stream-K pays.
constexpr double kLeastSteps = 4;

double ItemCycles(const StepCost& cost, int tiles) { return tiles * cost.step + cost.item; }

}  // namespace

std::optional<Tail> TailOf(std::span<const StepCost> costs, const StepCost& cost,
                           const DeviceShape& device, int tiles, int64_t items) {
  const int multiprocessors = device.multiprocessors;
  if (items < multiprocessors) return std::nullopt;
  const auto left = static_cast<int>(items % multiprocessors);
  std::optional<Tail> best;
  double least = left > 0 ? ItemCycles(cost, tiles) : 0;
  for (const StepCost& narrow : costs) {
    const int pieces = cost.tokens / narrow.tokens;
    const bool whole =
        cost.tokens % narrow.tokens == 0 && std::has_single_bit(static_cast<unsigned>(pieces));
    const double cycles = ItemCycles(narrow, tiles) + device.costs->wgmma.tail;
    if (!whole || pieces < 2 || left * pieces > multiprocessors || cycles >= least) continue;
    least = cycles;
    best = {left, narrow.tokens, cycles};
  }
  return best;
}

std::optional<Stream> StreamOf(const StepCost& cost, const DeviceShape& device, int tiles,
                               int64_t items) {
  const WgmmaCosts& costs = device.costs->wgmma;
  const int multiprocessors = device.multiprocessors;
  const auto left = static_cast<int>(items % multiprocessors);
  const int64_t all_steps = int64_t{left} * tiles;
  const auto steps = static_cast<double>(CeilDivide(all_steps, multiprocessors));
  // DivideStep is exact below this limit.
  if (steps < kLeastSteps || all_steps > (int64_t{1} << 32) / tiles) return std::nullopt;
  const int64_t whole_waves = items / multiprocessors;
  const auto waves = static_cast<double>(whole_waves);
  const WgmmaCosts::Reduction& reduction =
      waves > 0 ? costs.stream_before_waves : costs.stream_alone;
  const double cycles = waves * ItemCycles(cost, tiles) + steps * cost.step + cost.item +
                        reduction.fixed + cost.tokens * reduction.token +
                        (tiles / steps - 1) * reduction.part;
  return Stream{left, cost.tokens >= costs.hot_tokens ? cycles * costs.hot : cycles};
}

double CyclesOf(const StepCost& cost, int multiprocessors, int tiles, int64_t items,
                const std::optional<Tail>& tail) {
  const int64_t whole = items - (tail ? tail->items : 0);
  const auto waves = static_cast<double>(CeilDivide(whole, multiprocessors));
  return waves * ItemCycles(cost, tiles) + (tail ? tail->cycles : 0);
}

WgmmaArguments CutItems(const Tail& tail, int tokens, WgmmaArguments* whole) {
  WgmmaArguments rest = *whole;
  whole->items -= tail.items;
  const int pieces = tokens / tail.tokens;
  rest.first_item = whole->items;
  rest.pieces_log2 = std::countr_zero(static_cast<unsigned>(pieces));
  rest.items = tail.items * pieces;
  return rest;
}

}  // namespace marlin::cuda
