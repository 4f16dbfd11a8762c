#include "backends/metal/moe/expert_launches.h"

#include <algorithm>
#include <array>
#include <span>
#include <string_view>

#include "backends/metal/gemm/product_launches.h"
#include "backends/metal/kernels/expert_parameters.h"
#include "backends/metal/plan/launch_plan.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"

namespace marlin::metal {
namespace {

using kernels::kLanes;
using kernels::kSortThreads;
using kernels::kStripOutputs;

/// Threads per threadgroup of the elementwise kernels, along n.
constexpr int64_t kColumnThreads = 256;
constexpr uint32_t kGemmThreads = 128;
constexpr int64_t kGemmColumns = 64;

uint32_t ToU32(int64_t count) { return static_cast<uint32_t>(count); }

bool IsAligned(const ExpertsCall& call, DType type) {
  constexpr uintptr_t kVector = 16;
  return reinterpret_cast<uintptr_t>(call.x) % kVector == 0 &&
         static_cast<uintptr_t>(call.x_stride * DTypeBytes(type)) % kVector == 0;
}

std::string_view GemvFunction(int64_t tile_rows) {
  // One function per power of two.
  constexpr std::array<std::string_view, 5> kFunctions = {"moe_expert_gemv_1", "moe_expert_gemv_2",
                                                          "moe_expert_gemv_4", "moe_expert_gemv_8",
                                                          "moe_expert_gemv_16"};
  size_t rows_log2 = 0;
  while (int64_t{1} << rows_log2 < tile_rows) ++rows_log2;
  return kFunctions[rows_log2];
}

/// Builds the launches of one pass.
class PassLaunches {
 public:
  PassLaunches(const PlannedPass& planned, const ExpertsProblem& problem, const LayerExperts& layer,
               const ExpertTable& table, const ExpertsCall& call)
      : pass_(planned.pass),
        tiling_(planned.tiling),
        problem_(problem),
        layer_(layer),
        table_(table),
        call_(call),
        arrays_(LayOutArrays(planned, layer, table, call.workspace)) {}

  std::vector<KernelLaunch> Build(ErrorWords::Word* error) {
    AddSort(error);
    AddGemms(table_.first_groups(), XRows(), {arrays_.inner, table_.inner_stride()});
    AddGemms(table_.score_groups(), XRows(), {arrays_.scores, 1});
    AddGates();
    const Rows inner{arrays_.inner, table_.inner_stride(), DType::kF32, true, false};
    AddGemms(table_.down_groups(), inner, {arrays_.results, layer_.hidden});
    AddSum();
    return std::move(launches_);
  }

 private:
  /// The rows that GEMMs read.
  struct Rows {
    MemoryRange memory;
    int64_t stride;
    DType type;
    bool aligned;
    bool gathered;
  };
  /// The f32 rows of all slots that GEMMs write.
  struct SlotRows {
    MemoryRange memory;
    int64_t stride;
  };
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

  Rows XRows() const {
    const DType type = problem_.x_type;
    const int64_t bytes = ExtentBytes(pass_.tokens, layer_.hidden, call_.x_stride, type);
    return {{call_.x, bytes}, call_.x_stride, type, IsAligned(call_, type), true};
  }

  /// A launch with the parameters that all have.
  KernelLaunch Launch(std::string_view source, std::string_view function, uint32_t threads) const {
    KernelLaunch launch;
    launch.source = source;
    launch.function = function;
    launch.threads = threads;
    kernels::ExpertParameters p{};
    p.tokens = static_cast<int32_t>(pass_.tokens);
    p.top_k = static_cast<int32_t>(pass_.top_k);
    p.experts = static_cast<int32_t>(layer_.experts.size());
    if (pass_.shared) {
      p.shared =
          layer_.shared_gate == nullptr ? kernels::kSharedWithoutGate : kernels::kSharedWithGate;
    }
    p.columns = static_cast<int32_t>(layer_.hidden);
    p.most_few_rows = static_cast<int32_t>(tiling_.most_few_rows);
    p.few_tile_rows = static_cast<int32_t>(tiling_.few_tile_rows);
    p.many_tile_rows = static_cast<int32_t>(tiling_.many_tile_rows);
    p.few_tiles = static_cast<int32_t>(tiling_.few_tiles);
    p.many_tiles = static_cast<int32_t>(tiling_.many_tiles);
    p.gate_limit = problem_.gate.limit;
    p.gate_alpha = problem_.gate.alpha;
    launch.other_parameters = ParameterBlock(p);
    return launch;
  }

  static void Read(int index, const MemoryRange& range, KernelLaunch* launch) {
    launch->buffers.push_back({index, range.data, range.bytes});
  }
  static void Write(int index, const MemoryRange& range, KernelLaunch* launch) {
    launch->buffers.push_back({index, range.data, range.bytes, true, false});
  }
  static void Update(int index, const MemoryRange& range, KernelLaunch* launch) {
    launch->buffers.push_back({index, range.data, range.bytes, true, true});
  }

  MemoryRange Ids() const { return {call_.ids, pass_.selections() * int64_t{sizeof(int32_t)}}; }

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
    KernelLaunch launch =
        tiles.few ? Launch("expert_gemm.metal", GemvFunction(tiles.rows),
                           ToU32(GemvSimdgroups(strips, gated) * kLanes))
                  : Launch("expert_gemm.metal",
                           tiles.rows == 32 ? "moe_expert_gemm_32x64" : "moe_expert_gemm_64x64",
                           kGemmThreads);
    const int64_t columns =
        tiles.few ? strips : CeilDivide(group.columns, gated ? kGemmColumns / 2 : kGemmColumns);
    launch.threadgroups = {ToU32(columns), ToU32(tiles.count), ToU32(group.parts)};
    const int64_t k = from.gathered ? layer_.hidden : table_.inner_stride();
    launch.operations = 2 * pass_.slots() * group.columns * k;
    launch.reached = table_.reached();
    launch.constants = group.constants;
    launch.constants[MARLIN_CONSTANT_INPUT_TYPE] = ElementTypeOf(from.type);
    launch.constants[MARLIN_CONSTANT_ALIGNED_INPUT] = from.aligned ? 1 : 0;
    launch.constants[MARLIN_CONSTANT_GATHERED] = from.gathered ? 1 : 0;
    if (gated) SetGate(&launch);
    auto& p = launch.other_parameters.As<kernels::ExpertParameters>();
    p.input_stride = from.stride;
    p.output_stride = to.stride;
    p.first_tile = static_cast<int32_t>(tiles.first);
    p.first_part = group.part;
    Read(MARLIN_BUFFER_EXPERTS, table_.matrices(), &launch);
    Read(MARLIN_BUFFER_SLOT_BEGIN, arrays_.begin, &launch);
    Read(MARLIN_BUFFER_TILES, arrays_.tiles, &launch);
    Read(MARLIN_BUFFER_TOKENS, arrays_.tokens, &launch);
    Read(MARLIN_BUFFER_INPUT, from.memory, &launch);
    Write(MARLIN_BUFFER_OUTPUT, to.memory, &launch);
    launches_.push_back(std::move(launch));
  }

  void SetGate(KernelLaunch* launch) const {
    launch->constants[MARLIN_CONSTANT_ACTIVATION] = static_cast<int32_t>(problem_.gate.activation);
    launch->constants[MARLIN_CONSTANT_GATE_LIMITED] = problem_.gate.limit > 0 ? 1 : 0;
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
    KernelLaunch launch = Launch("combine_experts.metal", "moe_sum_experts", kColumnThreads);
    launch.threadgroups = {ToU32(CeilDivide(layer_.hidden, kColumnThreads)), ToU32(pass_.tokens),
                           1};
    launch.constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(problem_.out_type);
    auto& p = launch.other_parameters.As<kernels::ExpertParameters>();
    p.input_stride = layer_.hidden;
    p.output_stride = call_.out_stride;
    const int64_t out_bytes =
        ExtentBytes(pass_.tokens, layer_.hidden, call_.out_stride, problem_.out_type);
    const int64_t weight_bytes = pass_.selections() * int64_t{sizeof(float)};
    // Without a gate of the shared expert there are no scores, and the kernel reads none.
    const MemoryRange& scores = arrays_.scores.bytes > 0 ? arrays_.scores : arrays_.begin;
    Read(MARLIN_BUFFER_SLOT_BEGIN, arrays_.begin, &launch);
    Read(MARLIN_BUFFER_INPUT, arrays_.results, &launch);
    Write(MARLIN_BUFFER_OUTPUT, {call_.out, out_bytes}, &launch);
    Read(MARLIN_BUFFER_SLOT_OF, arrays_.slot_of, &launch);
    Read(MARLIN_BUFFER_SLOT_WEIGHTS, {call_.weights, weight_bytes}, &launch);
    Read(MARLIN_BUFFER_SCORES, scores, &launch);
    launches_.push_back(std::move(launch));
  }

  const ExpertPass& pass_;
  const ExpertTiling& tiling_;
  const ExpertsProblem& problem_;
  const LayerExperts& layer_;
  const ExpertTable& table_;
  const ExpertsCall& call_;
  const ExpertArrays arrays_;
  std::vector<KernelLaunch> launches_;
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
  arrays.begin = take(3 * (experts + 2));
  arrays.tiles = take(2 * (planned.tiling.few_tiles + planned.tiling.many_tiles));
  arrays.tokens = take(pass.slots());
  arrays.slot_of = take(pass.selections());
  arrays.ranks = take(pass.selections());
  arrays.counts = take(pass.sort_blocks() * (experts + 1));
  arrays.inner = take(pass.slots() * table.inner_stride());
  arrays.results = take(pass.slots() * layer.hidden);
  arrays.scores = take(table.score_groups().empty() ? 0 : pass.slots());
  return arrays;
}

std::vector<KernelLaunch> ExpertLaunches(const PlannedPass& planned, const ExpertsProblem& problem,
                                         const LayerExperts& layer, const ExpertTable& table,
                                         const ExpertsCall& call, ErrorWords::Word* error) {
  return PassLaunches(planned, problem, layer, table, call).Build(error);
}

}  // namespace marlin::metal
