#include "backends/metal/moe/expert_launches.h"

#include <algorithm>
#include <array>
#include <span>
#include <string_view>

#include "backends/metal/kernels/moe/expert_parameters.h"
#include "backends/metal/moe/decode_launches.h"
#include "backends/metal/moe/pass_launches.h"
#include "backends/metal/plan/launch_plan.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"

namespace marlin::metal {
namespace {

using kernels::kLanes;
using kernels::kSortThreads;
using kernels::kStripOutputs;

constexpr uint32_t kGemmThreads = 128;
constexpr int64_t kGemmColumns = 64;

std::string_view GemvFunction(int64_t tile_rows) {
  // One function per power of two.
  constexpr std::array<std::string_view, 5> kFunctions = {"moe_expert_gemv_1", "moe_expert_gemv_2",
                                                          "moe_expert_gemv_4", "moe_expert_gemv_8",
                                                          "moe_expert_gemv_16"};
  size_t rows_log2 = 0;
  while (int64_t{1} << rows_log2 < tile_rows) ++rows_log2;
  return kFunctions[rows_log2];
}

/// The launches of a pass whose selections are sorted.
class SortedLaunches : public PassLaunches {
 public:
  SortedLaunches(const PlannedPass& planned, const ExpertsProblem& problem,
                 const LayerExperts& layer, const ExpertTable& table, const ExpertsCall& call)
      : PassLaunches(planned, problem, layer, table, call) {}

  std::vector<KernelLaunch> Build(ErrorWords::Word* error) {
    AddSort(error);
    AddGemms(table_.first_groups(), XRows(), {arrays_.inner, table_.inner_stride()});
    AddGemms(table_.score_groups(), XRows(), {arrays_.scores, 1});
    AddGates();
    AddGemms(table_.down_groups(), InnerRows(), {arrays_.results, layer_.hidden});
    AddSum();
    return Take();
  }

 private:
  /// The tiles of the GEMV or the GEMM.
  struct Tiles {
    int64_t first;
    int64_t count;
    int64_t rows;
    bool few;
  };

  std::array<Tiles, 2> AllTiles() const {
    return {Tiles{0, tiling_.few_tiles, tiling_.few_tile_rows, true},
            Tiles{tiling_.few_tiles, tiling_.many_tiles, tiling_.many_tile_rows, false}};
  }

  void AddSort(ErrorWords::Word* error) {
    const MemoryRange word{error, sizeof(*error)};
    const auto launch = [&](std::string_view function) {
      KernelLaunch made = Launch("sort_experts.metal", function, kSortThreads);
      Read(MARLIN_BUFFER_INPUT, Ids(), &made);
      return made;
    };
    const auto write_slots = [&](KernelLaunch* to) {
      Read(MARLIN_BUFFER_EXPERTS, table_.matrices(), to);
      Write(MARLIN_BUFFER_TILES, arrays_.tiles, to);
      Write(MARLIN_BUFFER_TOKENS, arrays_.tokens, to);
      Write(MARLIN_BUFFER_SLOT_OF, arrays_.slot_of, to);
    };
    if (pass_.sort_blocks() == 1) {
      KernelLaunch sort = launch("moe_sort_experts");
      write_slots(&sort);
      Write(MARLIN_BUFFER_OUTPUT, word, &sort);
      Write(MARLIN_BUFFER_SLOT_BEGIN, arrays_.begin, &sort);
      Write(MARLIN_BUFFER_RANKS, arrays_.ranks, &sort);
      Write(MARLIN_BUFFER_COUNTS, arrays_.counts, &sort);
      launches_.push_back(std::move(sort));
      return;
    }
    KernelLaunch rank = launch("moe_rank_selections");
    Read(MARLIN_BUFFER_EXPERTS, table_.matrices(), &rank);
    Write(MARLIN_BUFFER_RANKS, arrays_.ranks, &rank);
    Write(MARLIN_BUFFER_COUNTS, arrays_.counts, &rank);
    rank.threadgroups[0] = ToU32(pass_.sort_blocks());
    launches_.push_back(std::move(rank));

    KernelLaunch scan = launch("moe_scan_experts");
    Write(MARLIN_BUFFER_OUTPUT, word, &scan);
    Write(MARLIN_BUFFER_SLOT_BEGIN, arrays_.begin, &scan);
    Update(MARLIN_BUFFER_COUNTS, arrays_.counts, &scan);
    launches_.push_back(std::move(scan));

    KernelLaunch scatter = launch("moe_scatter_selections");
    write_slots(&scatter);
    Read(MARLIN_BUFFER_SLOT_BEGIN, arrays_.begin, &scatter);
    Read(MARLIN_BUFFER_RANKS, arrays_.ranks, &scatter);
    Read(MARLIN_BUFFER_COUNTS, arrays_.counts, &scatter);
    scatter.threadgroups[0] = ToU32(pass_.sort_blocks());
    launches_.push_back(std::move(scatter));
  }

  /// The launches of a step: one per group and kind of tiles.
  void AddGemms(std::span<const MatrixGroup> groups, const Rows& from, const SlotRows& to) {
    for (const Tiles& tiles : AllTiles()) {
      for (const MatrixGroup& group : groups) {
        if (tiles.count > 0 && group.columns > 0) AddGemm(group, tiles, from, to);
      }
    }
  }

  void AddGemm(const MatrixGroup& group, const Tiles& tiles, const Rows& from, const SlotRows& to) {
    const bool gated = group.gated();
    const int64_t strips = CeilDivide(group.columns, int64_t{kStripOutputs});
    const std::string_view of_many =
        tiles.rows == 32 ? "moe_expert_gemm_32x64" : "moe_expert_gemm_64x64";
    const uint32_t threads =
        tiles.few ? ToU32(GemvSimdgroups(strips, group.chunks, gated) * kLanes) : kGemmThreads;
    KernelLaunch launch = GemmLaunch(
        "expert_gemm.metal", tiles.few ? GemvFunction(tiles.rows) : of_many, threads, group, from);
    const int64_t columns =
        tiles.few ? strips : CeilDivide(group.columns, gated ? kGemmColumns / 2 : kGemmColumns);
    launch.threadgroups = {ToU32(columns), ToU32(tiles.count), ToU32(group.parts)};
    const int64_t k = from.gathered ? layer_.hidden : table_.inner_stride();
    launch.operations = 2 * pass_.slots() * group.columns * k;
    auto& p = launch.other_parameters.As<kernels::ExpertParameters>();
    p.output_stride = to.stride;
    p.first_tile = static_cast<int32_t>(tiles.first);
    Read(MARLIN_BUFFER_SLOT_BEGIN, arrays_.begin, &launch);
    Read(MARLIN_BUFFER_TILES, arrays_.tiles, &launch);
    Read(MARLIN_BUFFER_TOKENS, arrays_.tokens, &launch);
    Write(MARLIN_BUFFER_OUTPUT, to.memory, &launch);
    launches_.push_back(std::move(launch));
  }

  /// The activation of experts whose gate and up are sums of different launches.
  void AddGates() {
    if (table_.ungated_inner() == 0) return;
    for (const Tiles& tiles : AllTiles()) {
      if (tiles.count == 0) continue;
      KernelLaunch launch = Launch("combine_experts.metal", "moe_gate_experts", kColumnThreads);
      launch.threadgroups = {ToU32(CeilDivide(table_.ungated_inner(), kColumnThreads)),
                             ToU32(tiles.count), 1};
      SetGate(&launch);
      auto& p = launch.other_parameters.As<kernels::ExpertParameters>();
      p.output_stride = table_.inner_stride();
      p.first_tile = static_cast<int32_t>(tiles.first);
      p.tile_rows = static_cast<int32_t>(tiles.rows);
      Read(MARLIN_BUFFER_EXPERTS, table_.matrices(), &launch);
      Read(MARLIN_BUFFER_SLOT_BEGIN, arrays_.begin, &launch);
      Read(MARLIN_BUFFER_TILES, arrays_.tiles, &launch);
      Update(MARLIN_BUFFER_OUTPUT, arrays_.inner, &launch);
      launches_.push_back(std::move(launch));
    }
  }

  void AddSum() {
    KernelLaunch launch = SumLaunch();
    Read(MARLIN_BUFFER_SLOT_BEGIN, arrays_.begin, &launch);
    Read(MARLIN_BUFFER_SLOT_OF, arrays_.slot_of, &launch);
    Read(MARLIN_BUFFER_SCORES, ScoresOr(arrays_.begin), &launch);
    launches_.push_back(std::move(launch));
  }
};

}  // namespace

ExpertArrays LayOutArrays(const PlannedPass& planned, const LayerExperts& layer,
                          const ExpertTable& table, std::byte* workspace) {
  const ExpertPass& pass = planned.pass;
  const auto experts = static_cast<int64_t>(layer.experts.size());
  ExpertArrays arrays;
  const auto take = [&](int64_t words) {
    const MemoryRange range{workspace == nullptr ? nullptr : workspace + arrays.bytes, words * 4};
    arrays.bytes += RoundUp(range.bytes, kBufferAlignment);
    return range;
  };
  if (!planned.unsorted) {
    arrays.begin = take(3 * (experts + 2));
    arrays.tiles = take(2 * (planned.tiling.few_tiles + planned.tiling.many_tiles));
    arrays.tokens = take(pass.slots());
    arrays.slot_of = take(pass.selections());
    arrays.ranks = take(pass.selections());
    arrays.counts = take(pass.sort_blocks() * (experts + 1));
  }
  arrays.inner = take(pass.slots() * table.inner_stride());
  const bool sums = planned.unsorted && table.down_groups().size() == 1;
  arrays.results = take(sums ? 0 : pass.slots() * layer.hidden);
  arrays.scores = take(table.score_groups().empty() ? 0 : pass.slots());
  return arrays;
}

std::vector<KernelLaunch> ExpertLaunches(const PlannedPass& planned, const ExpertsProblem& problem,
                                         const LayerExperts& layer, const ExpertTable& table,
                                         const ExpertsCall& call, ErrorWords::Word* error) {
  if (planned.unsorted) return DecodeLaunches(planned, problem, layer, table, call, error);
  return SortedLaunches(planned, problem, layer, table, call).Build(error);
}

}  // namespace marlin::metal
