#include "backends/cuda/tile_waves.h"

#include <bit>

#include "base/checked.h"

namespace marlin::cuda {
namespace {

/// What another launch for the last items costs; it begins while the first ends.
constexpr double kTailCycles = 7000;

double ItemCycles(const StepCost& cost, int tiles) { return tiles * cost.step + cost.item; }

}  // namespace

std::optional<Tail> TailOf(std::span<const StepCost> costs, const StepCost& cost,
                           int multiprocessors, int tiles, int64_t items) {
  if (items < multiprocessors) return std::nullopt;
  const auto left = static_cast<int>(items % multiprocessors);
  std::optional<Tail> best;
  double least = left > 0 ? ItemCycles(cost, tiles) : 0;
  for (const StepCost& narrow : costs) {
    const int pieces = cost.tokens / narrow.tokens;
    const bool whole =
        cost.tokens % narrow.tokens == 0 && std::has_single_bit(static_cast<unsigned>(pieces));
    const double cycles = ItemCycles(narrow, tiles) + kTailCycles;
    if (!whole || pieces < 2 || left * pieces > multiprocessors || cycles >= least) continue;
    least = cycles;
    best = {left, narrow.tokens, cycles};
  }
  return best;
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
  rest.pieces_log = std::countr_zero(static_cast<unsigned>(pieces));
  rest.items = tail.items * pieces;
  return rest;
}

}  // namespace marlin::cuda
