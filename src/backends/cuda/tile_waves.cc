#include "backends/cuda/tile_waves.h"

#include <bit>

#include "base/checked.h"

namespace marlin::cuda {
namespace {

/// What another launch for the last items costs; it begins while the first ends.
constexpr double kTailCycles = 7000;

/// What it costs that parts of items meet, whose sums are stored and read again: fitted to 138
/// products of 14 matrices with 24 to 2,048 rows on an H200 (2026-11-22).
struct MeetingCycles {
  double fixed;
  double token;
  double part;  ///< Of an item, from the second on.
};
constexpr MeetingCycles kBeforeWholeItems = {3500, 50, 0};
constexpr MeetingCycles kPartsAlone = {2500, 20, 1100};
/// With so many tokens the card is at its power limit: where multiprocessors are idle, the others
/// are faster.
constexpr int kHotTokens = 192;
constexpr double kHot = 1.02;
/// Steps of a block that are worth it.
constexpr double kLeastSteps = 4;

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

std::optional<Stream> StreamOf(const StepCost& cost, int multiprocessors, int tiles,
                               int64_t items) {
  const auto left = static_cast<int>(items % multiprocessors);
  const int64_t all_steps = int64_t{left} * tiles;
  const auto steps = static_cast<double>(CeilDivide(all_steps, multiprocessors));
  // DivideStep is exact up to here.
  if (steps < kLeastSteps || all_steps > (int64_t{1} << 32) / tiles) return std::nullopt;
  const int64_t whole_waves = items / multiprocessors;
  const auto waves = static_cast<double>(whole_waves);
  const MeetingCycles& meeting = waves > 0 ? kBeforeWholeItems : kPartsAlone;
  const double cycles = waves * ItemCycles(cost, tiles) + steps * cost.step + cost.item +
                        meeting.fixed + cost.tokens * meeting.token +
                        (tiles / steps - 1) * meeting.part;
  return Stream{left, cost.tokens >= kHotTokens ? cycles * kHot : cycles};
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
