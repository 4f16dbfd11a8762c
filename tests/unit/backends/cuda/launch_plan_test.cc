// How products are cut into thread blocks, for shapes that no machine here could multiply:
// everything is covered once, fits, and is counted in numbers that do not overflow.
#include "backends/cuda/launch_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "backends/cuda/kernel_table.h"
#include "base/checked.h"

namespace marlin::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kNamedBarriers = 16;

std::string Describe(const TileProblem& problem, const DeviceShape& device) {
  return "m " + std::to_string(problem.m) + ", n " + std::to_string(problem.n) + ", k " +
         std::to_string(problem.k) + ", tile " + std::to_string(problem.tile_bytes) +
         (problem.gated ? ", gated" : "") + (problem.batch_invariant ? ", invariant" : "") +
         ", multiprocessors " + std::to_string(device.multiprocessors);
}

/// The sizes of a tile of every kind of codes with every number of groups, with zeros and without.
std::vector<int> AllTileBytes() {
  std::vector<int> sizes;
  for (const CodeKind kind :
       {CodeKind::kFp4, CodeKind::kTable3, CodeKind::kTable2, CodeKind::kE4M3}) {
    for (const int groups : {1, 2, 4, 8}) {
      for (const int parameters : {1, 2}) {
        sizes.push_back(TileCodeBytes(CodeBits(kind)) + groups * kGroupBytes * parameters);
      }
    }
  }
  sizes.push_back(TileCodeBytes(CodeBits(CodeKind::kDense16)));
  return sizes;
}

/// Problems with dimensions from 1 up that are as likely small as large, and those around the sizes
/// of tiles, strips and blocks.
std::vector<TileProblem> ManyProblems(int max_m, size_t count) {
  constexpr int kMaxLog = 17;
  std::mt19937 bits(20261121);
  const auto draw = [&bits](int largest) {
    const int log = static_cast<int>(bits() % (kMaxLog + 1));
    const int near = 1 << log;
    switch (bits() % 4) {
      case 0:
        return std::min(near, largest);
      case 1:
        return std::clamp(near + static_cast<int>(bits() % 3) - 1, 1, largest);
      default:
        return std::clamp(near + static_cast<int>(bits() % static_cast<uint32_t>(near)), 1,
                          largest);
    }
  };
  const std::vector<int> tile_bytes = AllTileBytes();
  std::vector<TileProblem> problems;
  for (size_t i = 0; i < count; ++i) {
    TileProblem problem;
    problem.m = 1 + static_cast<int>(bits() % static_cast<uint32_t>(max_m));
    problem.n = draw(200000);
    problem.k = draw(200000);
    problem.tile_bytes = tile_bytes[i % tile_bytes.size()];
    problem.gated = problem.n % 2 == 0 && bits() % 4 == 0;
    problem.pair_table = bits() % 4 == 0;
    problem.narrow_codes = problem.tile_bytes == TileCodeBytes(4) + kGroupBytes;
    problem.batch_invariant = bits() % 4 == 0;
    problems.push_back(problem);
  }
  return problems;
}

std::vector<DeviceShape> Devices() {
  std::vector<DeviceShape> devices(4);  // An H200, smaller parts of one, and more than there are.
  devices[1].multiprocessors = 114;
  devices[2].multiprocessors = 16;
  devices[3].multiprocessors = 200;
  for (size_t i = 1; i < devices.size(); ++i) {
    for (int blocks = 1; blocks <= kMaxSplits; ++blocks) {
      devices[i].clusters[blocks - 1] = devices[i].multiprocessors / blocks;
    }
  }
  return devices;
}

/// Splits of `part` tiles each cover `tiles` once, and none of them is empty.
void ExpectSplitsCover(int tiles, int part, int splits) {
  EXPECT_GE(part, 1);
  EXPECT_GE(int64_t{part} * splits, tiles);
  EXPECT_LT(int64_t{part} * (splits - 1), tiles);
}

/// Regions of shared memory follow one another, aligned for what lies in them.
struct Regions {
  int64_t end = 0;
  void Add(const char* name, int64_t begin, int64_t bytes, int64_t alignment) {
    EXPECT_GE(begin, end) << name;
    EXPECT_EQ(begin % alignment, 0) << name;
    end = begin + bytes;
  }
};

/// Every (strip, tile) of a block is one warp's: as the kernel numbers its warps.
void ExpectWarpsCover(const GemvArguments& args, int warps, int strips, int tiles) {
  const int lanes = 1 << args.lanes_log;
  ASSERT_EQ(args.share, 1 << args.share_log);
  ASSERT_EQ(args.share * lanes, warps);
  EXPECT_LE(lanes, std::max(strips, 1)) << "a warp without a strip";
  if (args.share > 1) {
    EXPECT_LT(lanes, kNamedBarriers) << "barrier 0 is the block's";
  }
  if (int64_t{strips} * tiles > 20000) return;  // The shape of the argument is seen in small ones.
  std::vector<int> covered(static_cast<size_t>(strips) * static_cast<size_t>(tiles), 0);
  for (int warp = 0; warp < warps; ++warp) {
    const int sharer = warp & (args.share - 1);
    for (int strip = warp >> args.share_log; strip < strips; strip += lanes) {
      const int mine = tiles > sharer ? (tiles - sharer + args.share - 1) >> args.share_log : 0;
      for (int i = 0; i < mine; ++i) {
        const int tile = i * args.share + sharer;
        ASSERT_LT(tile, tiles);
        ++covered[static_cast<size_t>(strip) * static_cast<size_t>(tiles) +
                  static_cast<size_t>(tile)];
      }
    }
  }
  EXPECT_TRUE(std::all_of(covered.begin(), covered.end(), [](int c) { return c == 1; }));
}

/// Every (row, piece) of the activations is one copy of one warp of the blocks that share: as the
/// kernel numbers its copies.
void ExpectRowsCopiedOnce(const GemvArguments& args, int warps) {
  EXPECT_LE(args.row_mask, args.m - 1);
  EXPECT_EQ(args.row_mask & (args.row_mask + 1), 0) << "no mask";
  std::vector<int> copied(static_cast<size_t>(args.pieces) * static_cast<size_t>(args.m), 0);
  for (int first = 0; first < warps * args.mates; ++first) {
    int piece = first * args.piece_factor >> 16;
    int row = first - piece * args.m;
    while (piece < args.pieces) {
      ASSERT_GE(row, 0);
      ASSERT_LT(row, args.m);
      ++copied[static_cast<size_t>(piece) * static_cast<size_t>(args.m) + static_cast<size_t>(row)];
      piece += args.step_pieces;
      row += args.step_rows;
      if (row >= args.m) {
        row -= args.m;
        ++piece;
      }
    }
  }
  EXPECT_TRUE(std::all_of(copied.begin(), copied.end(), [](int c) { return c == 1; }));
}

void CheckGemvPlan(const GemvPlan& plan, const TileProblem& problem, const DeviceShape& device) {
  const GemvArguments& args = plan.arguments;
  EXPECT_EQ(args.m, problem.m);
  EXPECT_EQ(args.k, problem.k);
  EXPECT_EQ(args.tiles, CeilDivide(problem.k, kTileK));
  ExpectSplitsCover(args.tiles, args.tiles_of_split, plan.splits);
  EXPECT_EQ(args.splits, plan.splits);
  const bool meet = plan.splits > 1 && plan.splits <= kMaxSplits && !problem.gated;
  EXPECT_EQ(args.in_cluster, meet && !plan.in_memory);
  EXPECT_TRUE(meet || !plan.in_memory);
  EXPECT_EQ(plan.partials, problem.gated || (plan.splits > 1 && !args.in_cluster));
  EXPECT_LE(plan.warps * 32, kMaxThreads);

  // Blocks along n: the first units_rest of them have one unit more; of two that share copies the
  // second may have none.
  const int64_t units = CeilDivide(problem.n, kStripOutputs * plan.strips);
  EXPECT_TRUE(args.units_base >= 1 || (args.mates == 2 && args.units_rest == plan.groups - 1));
  EXPECT_LT(args.units_rest, plan.groups);
  EXPECT_EQ(int64_t{args.units_base} * plan.groups + args.units_rest, units);
  EXPECT_EQ(UnitsOf(plan), units);
  const int cluster = (args.in_cluster ? args.splits : 1) * args.mates;
  ASSERT_LE(cluster, kMaxSplits);
  EXPECT_EQ(plan.groups % args.mates, 0);
  EXPECT_LE(plan.groups / args.mates,
            std::max(1, args.in_cluster || args.splits == 1
                            ? (cluster == 1 ? device.multiprocessors : device.clusters[cluster - 1])
                            : device.multiprocessors / plan.splits / args.mates))
      << "a second wave";
  ExpectWarpsCover(args, plan.warps, args.units_base + (args.units_rest > 0 ? 1 : 0),
                   args.tiles_of_split);

  // Pieces of the activations.
  EXPECT_LE(args.pieces, kMaxPieces);
  EXPECT_LE(args.pieces, plan.warps) << "a warp makes ready the barrier of one piece";
  ExpectSplitsCover(args.tiles_of_split, 1 << args.piece_log, args.pieces);
  EXPECT_TRUE(args.mates == 1 || args.bulk);
  EXPECT_EQ(args.bulk, problem.k % 8 == 0);

  ExpectRowsCopiedOnce(args, plan.warps);

  EXPECT_GE(args.stages, 1);
  EXPECT_GE(args.first_stages, 1);
  EXPECT_LE(args.first_stages, args.stages);
  EXPECT_GE(args.row_bytes, int64_t{args.tiles_of_split} * kTileK * 2);
  EXPECT_EQ(args.row_bytes % 16, 0);
  Regions regions;
  regions.Add("rings", 0, int64_t{plan.warps} * args.stages * plan.strips * problem.tile_bytes,
              128);
  regions.Add("activations", args.activations_offset, int64_t{args.row_bytes} * problem.m, 16);
  regions.Add("sums", args.sums_offset, int64_t{plan.warps} * kSumFloats * 4, 16);
  EXPECT_LE(args.share, kMaxSharers);
  const int64_t strips = int64_t{args.units_base + (args.units_rest > 0 ? 1 : 0)} * plan.strips;
  const int64_t parts = args.in_cluster ? RoundUp(strips, int64_t{args.splits}) : 0;
  regions.Add("inbox", args.inbox_offset,
              args.in_cluster ? kInboxBarrierBytes + parts * problem.m * kStripOutputs * 4 : 0, 16);
  regions.Add("table", args.table_offset, problem.pair_table ? kPairTableBytes : 0, 4);
  regions.Add("barriers", args.barriers_offset,
              (kMaxPieces + int64_t{plan.warps} * args.stages) * 8, 8);
  EXPECT_LE(regions.end, plan.shared_bytes);
  EXPECT_LE(plan.shared_bytes, device.shared_bytes);
}

void CheckGemv(const TileProblem& problem, const DeviceShape& device) {
  const GemvPlan plan = PlanGemv(problem, device);
  // Other kernels are not compiled for two strips.
  EXPECT_TRUE(plan.strips == 1 || (problem.narrow_codes && problem.m <= kOctet));
  CheckGemvPlan(plan, problem, device);
}

/// Every way to make blocks of so many splits and mates that shared memory allows.
void CheckEveryGemvShape(const TileProblem& problem, const DeviceShape& device, int splits,
                         int mates) {
  const int stages = 1 + splits % 3;
  const int first_stages = 1 + splits % stages;
  for (const int warps : {4, 8, 16}) {
    for (const bool in_memory : {false, true}) {
      for (const int strips : {1, 2}) {
        const GemvShape shape = {warps, stages, first_stages, splits, strips, mates, in_memory};
        const auto plan = PlanGemvAs(problem, device, shape);
        if (plan) CheckGemvPlan(*plan, problem, device);
      }
    }
  }
}

void CheckEveryGemvShape(const TileProblem& problem, const DeviceShape& device) {
  for (const int splits : {1, 2, 3, 4, 7, 8, 9, 40}) {
    CheckEveryGemvShape(problem, device, splits, 1);
    if (problem.k % 8 == 0 && splits * 2 <= kMaxSplits) {
      CheckEveryGemvShape(problem, device, splits, 2);
    }
  }
}

/// The strips that the blocks of a gated product read, as StripOf in wgmma_block.cuh numbers them.
void ExpectGatedStripsCovered(const WgmmaArguments& args, int n) {
  ASSERT_EQ(args.half_strips * kStripOutputs * 2, n);
  std::vector<bool> seen(static_cast<size_t>(args.half_strips) * 2, false);
  for (int block = 0; block < args.blocks; ++block) {
    for (int i = 0; i < kStripsOfBlock; ++i) {
      const int gate = block * 2 + i / 2;
      ASSERT_LT(gate, args.half_strips);
      seen[static_cast<size_t>(i % 2 == 0 ? gate : gate + args.half_strips)] = true;
    }
  }
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](bool one) { return one; }));
}

/// Every block has tiles of k, and all that divide an item run at once, one item each; in a cluster
/// they also have a part of the sums to finish.
void CheckSplits(const WgmmaPlan& plan, const DeviceShape& device) {
  const WgmmaArguments& args = plan.arguments;
  ASSERT_GE(args.splits, 1);
  ASSERT_LE(args.splits, kMaxSplits);
  int next = 0;
  for (int split = 0; split < args.splits; ++split) {
    const WgmmaItem item = ItemAt(args, 0, split);
    EXPECT_EQ(item.first_tile, next);
    EXPECT_GT(item.tiles, 0) << "a block without k";
    next += item.tiles;
  }
  EXPECT_EQ(next, args.tiles);
  if (args.splits == 1) return;
  EXPECT_EQ(plan.groups, args.items);
  EXPECT_EQ(args.in_cluster, plan.tokens <= kMaxClusterTokens && args.splits <= plan.tokens / 8 &&
                                 args.items <= device.clusters[args.splits - 1]);
  if (!args.in_cluster) {
    EXPECT_LE(args.items * args.splits, device.multiprocessors);
    return;
  }
  // As OwnerOf in wgmma_meeting.cuh gives them out.
  const int units = UnitsOfItem(plan.tokens);
  std::vector<int> owned(static_cast<size_t>(args.splits), 0);
  for (int unit = 0; unit < units; ++unit) {
    ++owned[static_cast<size_t>(unit) * static_cast<size_t>(args.splits) /
            static_cast<size_t>(units)];
  }
  for (const int of_block : owned) {
    EXPECT_GT(of_block, 0) << "a block without sums";
    EXPECT_LE(of_block * kUnitBytes, SenderBytes(plan.tokens, args.splits));
  }
}

/// What one launch has in shared memory.
void CheckWgmmaLaunch(const WgmmaLaunch& launch, const TileProblem& problem,
                      const DeviceShape& device) {
  const WgmmaArguments& args = launch.arguments;
  EXPECT_NE(std::find(std::begin(kWgmmaWidths), std::end(kWgmmaWidths), launch.tokens),
            std::end(kWgmmaWidths));
  EXPECT_EQ(args.m, problem.m);
  EXPECT_EQ(args.tiles, CeilDivide(problem.k, kTileK));
  const int64_t at_once = device.multiprocessors / args.splits;
  EXPECT_EQ(launch.groups, args.streamed > 0 ? at_once : std::min<int64_t>(args.items, at_once));
  EXPECT_GE(launch.groups, 1);
  const int slots_of_step = SlotsOfStep(problem.tile_bytes / TileCodeBytes(1), launch.tokens);
  EXPECT_GE(args.slots, 2 * slots_of_step) << "no copy would overlap a product";
  EXPECT_GE(args.weight_slots * slots_of_step, args.slots) << "weights would be overwritten";
  const int64_t activations =
      int64_t{args.slots} * (StepActivationBytes(launch.tokens) / slots_of_step);
  const int64_t weights = int64_t{args.weight_slots} * kStripsOfBlock * problem.tile_bytes;
  Regions regions;
  regions.Add("activations", 0, activations, 1024);
  EXPECT_EQ(StepActivationBytes(launch.tokens) / 2 % 1024, 0) << "the swizzle's period";
  regions.Add("weights", args.weights_offset, weights, 16);
  regions.Add("exchange", args.exchange_offset, kExchangeBytes, 16);
  if (args.in_cluster) {
    regions.Add("inbox", args.inbox_offset, InboxBytes(launch.tokens, args.splits), 16);
  }
  regions.Add("barriers", args.barriers_offset, int64_t{args.slots} * 16 + 8, 8);
  EXPECT_LE(regions.end, launch.shared_bytes);
  EXPECT_LE(launch.shared_bytes, device.shared_bytes);
}

/// Every token meets every block of outputs in one item of a plan's launches.
void ExpectItemsCover(const WgmmaPlan& plan) {
  constexpr int kFewestTokens = kWgmmaWidths[0];
  const WgmmaArguments& args = plan.arguments;
  const auto parts = static_cast<size_t>(CeilDivide(args.m, kFewestTokens));
  const auto blocks = static_cast<size_t>(args.blocks);
  if (parts * blocks > 20000) return;
  std::vector<int> covered(parts * blocks, 0);
  const auto cover = [&](const WgmmaLaunch& launch) {
    for (int i = 0; i < launch.arguments.items + launch.arguments.streamed; ++i) {
      const WgmmaItem item = ItemAt(launch.arguments, i, 0);
      ASSERT_LT(item.block, args.blocks);
      const int parts_of_tile = launch.tokens / kFewestTokens;
      for (int part = 0; part < parts_of_tile; ++part) {
        const auto row = static_cast<size_t>(item.token_tile * parts_of_tile + part);
        // Rows behind m are not stored.
        if (row < parts) ++covered[row * blocks + static_cast<size_t>(item.block)];
      }
    }
  };
  cover(plan);
  if (plan.tail) cover(*plan.tail);
  EXPECT_TRUE(std::all_of(covered.begin(), covered.end(), [](int c) { return c == 1; }));
}

/// Every step of streamed items is one block's, as ItemSequence in wgmma_block.cuh takes them, and
/// parts have places of their own in the workspace, as StreamMeeting gives them out.
void CheckStream(const WgmmaPlan& plan, const TileProblem& problem) {
  const WgmmaArguments& args = plan.arguments;
  EXPECT_FALSE(problem.batch_invariant);
  EXPECT_FALSE(plan.partials);
  EXPECT_FALSE(plan.tail);
  EXPECT_EQ(args.items % plan.groups, 0) << "whole waves";
  const int64_t part_bytes = int64_t{plan.tokens} * kBlockOutputs * 4;
  const int64_t places = (SumBytes(problem, plan) - StreamTicketBytes(plan)) / part_bytes;
  EXPECT_GE(StreamTicketBytes(plan), int64_t{args.streamed} * kTicketsOfItem * 4);
  std::vector<bool> taken(static_cast<size_t>(places), false);
  int next = 0;
  for (int block = 0; block < plan.groups; ++block) {
    const int end = FirstStepOf(args, block + 1);
    ASSERT_EQ(FirstStepOf(args, block), next);
    ASSERT_GE(end, next);
    ASSERT_LE(end - next, args.run);
    for (int step = next; step < end;) {
      const int streamed = DivideStep(step, args.tiles_inverse);
      ASSERT_EQ(streamed, step / args.tiles);
      WgmmaItem item = ItemAt(args, args.items + streamed, 0);
      TakePart(args, streamed, next, end, &item);
      ASSERT_EQ(streamed * args.tiles + item.first_tile, step);
      ASSERT_GT(item.tiles, 0);
      ASSERT_LE(item.first_tile + item.tiles, args.tiles);
      step += item.tiles;
      if (item.tiles == args.tiles) continue;
      const int first_block = DivideStep(streamed * args.tiles, args.run_inverse);
      ASSERT_EQ(DivideStep(step - 1, args.run_inverse), block);
      const int place = block == first_block ? plan.groups + streamed : block;
      ASSERT_LT(place, places);
      ASSERT_FALSE(taken[static_cast<size_t>(place)]);
      taken[static_cast<size_t>(place)] = true;
    }
    next = end;
  }
  EXPECT_EQ(next, args.streamed * args.tiles);
}

void CheckWgmmaPlan(const WgmmaPlan& plan, const TileProblem& problem, const DeviceShape& device) {
  const WgmmaArguments& args = plan.arguments;
  CheckWgmmaLaunch(plan, problem, device);
  CheckSplits(plan, device);
  if (problem.batch_invariant) {
    EXPECT_EQ(args.splits, 1);
  }
  EXPECT_EQ(args.token_tiles, CeilDivide(problem.m, plan.tokens));
  if (args.half_strips != 0) {
    EXPECT_TRUE(problem.gated);
    ExpectGatedStripsCovered(args, problem.n);
  } else {
    EXPECT_EQ(args.blocks, CeilDivide(problem.n, kBlockOutputs));
  }
  const bool gates_apart = problem.gated && args.half_strips == 0;
  EXPECT_EQ(plan.partials, gates_apart || (args.splits > 1 && !args.in_cluster));
  int64_t items = int64_t{args.items} + args.streamed;
  if (args.streamed > 0) CheckStream(plan, problem);
  if (plan.tail) {
    EXPECT_EQ(args.splits, 1);
    EXPECT_EQ(args.items % device.multiprocessors, 0) << "whole waves";
    CheckWgmmaLaunch(*plan.tail, problem, device);
    EXPECT_LE(plan.tail->arguments.items, device.multiprocessors) << "one wave";
    items += plan.tail->arguments.items >> plan.tail->arguments.pieces_log;
  }
  EXPECT_EQ(items, int64_t{args.token_tiles} * args.blocks);
  ExpectItemsCover(plan);
}

void CheckWgmma(const TileProblem& problem, const DeviceShape& device) {
  CheckWgmmaPlan(PlanWgmma(problem, device), problem, device);
}

/// All widths, and all clusters that the problem and the device have room for.
void CheckEveryWgmmaShape(const TileProblem& problem, const DeviceShape& device) {
  const int64_t tiles = CeilDivide(problem.k, kTileK);
  for (const int tokens : kWgmmaWidths) {
    const WgmmaPlan whole = PlanWgmmaAs(problem, device, {tokens, 1});
    EXPECT_EQ(whole.tokens, tokens);
    CheckWgmmaPlan(whole, problem, device);
    for (int splits = 2; splits <= kMaxSplits; ++splits) {
      if (!CanPlanWgmmaAs(problem, device, {tokens, splits})) continue;
      EXPECT_FALSE(problem.batch_invariant);
      EXPECT_LE(splits, tiles);
      const WgmmaPlan divided = PlanWgmmaAs(problem, device, {tokens, splits});
      EXPECT_EQ(divided.arguments.splits, splits);
      CheckWgmmaPlan(divided, problem, device);
    }
  }
}

TEST(PlanGemv, CoversEveryShapeOnce) {
  for (const DeviceShape& device : Devices()) {
    for (const TileProblem& problem : ManyProblems(kMaxGemvRows, 5000)) {
      SCOPED_TRACE(Describe(problem, device));
      CheckGemv(problem, device);
      if (HasFailure()) return;
    }
  }
}

TEST(PlanGemv, CoversInEveryShapeOfBlocks) {
  for (const DeviceShape& device : Devices()) {
    for (const TileProblem& problem : ManyProblems(kMaxGemvRows, 500)) {
      SCOPED_TRACE(Describe(problem, device));
      CheckEveryGemvShape(problem, device);
      if (HasFailure()) return;
    }
  }
}

TEST(PlanGemv, CoversEverySmallShapeOnce) {
  const DeviceShape device;
  for (const int m : {1, 2, 7, 8, 9, 16}) {
    for (int strips = 1; strips <= 300; ++strips) {
      for (int tiles = 1; tiles <= 40; ++tiles) {
        TileProblem problem;
        problem.m = m;
        problem.n = strips * kStripOutputs - strips % kStripOutputs;
        problem.k = tiles * kTileK - tiles % 3;
        problem.tile_bytes = TileCodeBytes(4) + kGroupBytes;
        problem.narrow_codes = strips % 2 == 0;
        SCOPED_TRACE(Describe(problem, device));
        CheckGemv(problem, device);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(PlanGemv, EndsForEveryLengthOfRows) {
  const DeviceShape device;
  for (const int k : {1 << 20, 1 << 22, (1 << 22) + 1, 100000000, 2147483000}) {
    for (const int m : {1, kMaxGemvRows}) {
      for (const int tile_bytes : AllTileBytes()) {
        const TileProblem problem = {.m = m, .n = 64, .k = k, .tile_bytes = tile_bytes};
        SCOPED_TRACE(Describe(problem, device));
        CheckGemv(problem, device);
        if (HasFailure()) return;
      }
    }
  }
}

TileProblem Fp4Problem(int m, int n, int k) {
  TileProblem problem = {.m = m, .n = n, .k = k, .tile_bytes = TileCodeBytes(4) + kGroupBytes};
  problem.narrow_codes = true;
  return problem;
}

/// What was measured to be the fastest on an H200.
TEST(PlanGemv, SharesCopiesWhereTheyAreMany) {
  const DeviceShape device;
  const GemvPlan few_strips = PlanGemv(Fp4Problem(16, 8192, 8192), device);
  EXPECT_EQ(few_strips.splits, 2);
  EXPECT_TRUE(few_strips.in_memory);
  EXPECT_EQ(few_strips.arguments.mates, 2);
  EXPECT_EQ(few_strips.arguments.stages, 2);
  EXPECT_TRUE(PlanGemv(Fp4Problem(16, 28672, 8192), device).arguments.in_cluster);
  EXPECT_EQ(PlanGemv(Fp4Problem(8, 28672, 8192), device).strips, 2);
  EXPECT_EQ(PlanGemv(Fp4Problem(2, 4096, 4096), device).arguments.mates, 1);
  EXPECT_EQ(PlanGemv(Fp4Problem(3, 4096, 4096), device).arguments.mates, 2);
  EXPECT_EQ(PlanGemv(Fp4Problem(8, 768, 2048), device).arguments.mates, 1);
}

/// Rules alone took 1.1 to 1.7 times as long for these on an H200, but for the last.
TEST(PlanGemv, DividesKWhereStripsWouldLeaveBlocksIdle) {
  const DeviceShape device;
  struct Expected {
    int m, n, k, splits, strips;
  };
  for (const Expected& e : {Expected{8, 5120, 13824, 3, 1}, Expected{14, 5120, 13824, 3, 1},
                            Expected{14, 3584, 18944, 4, 1}, Expected{12, 28672, 8192, 2, 1},
                            Expected{8, 22016, 4096, 1, 1}, Expected{8, 10240, 8192, 3, 1},
                            Expected{9, 8192, 28672, 4, 1}, Expected{8, 8192, 8192, 1, 1}}) {
    SCOPED_TRACE(testing::Message() << e.m << " x " << e.n << " x " << e.k);
    const GemvPlan plan = PlanGemv(Fp4Problem(e.m, e.n, e.k), device);
    EXPECT_EQ(plan.splits, e.splits);
    EXPECT_EQ(plan.strips, e.strips);
    EXPECT_EQ(plan.warps, 16);
  }
}

TEST(PlanWgmma, CoversEveryShapeOnce) {
  for (const DeviceShape& device : Devices()) {
    for (const TileProblem& problem : ManyProblems(300, 5000)) {
      SCOPED_TRACE(Describe(problem, device));
      CheckWgmma(problem, device);
      if (HasFailure()) return;
    }
  }
}

TEST(PlanWgmma, CoversWithEveryWidthAndCluster) {
  for (const DeviceShape& device : Devices()) {
    for (TileProblem problem : ManyProblems(300, 2000)) {
      problem.n = 1 + problem.n % 4096;  // Few items: there are clusters for them.
      problem.gated = problem.gated && problem.n % 2 == 0;
      SCOPED_TRACE(Describe(problem, device));
      CheckEveryWgmmaShape(problem, device);
      if (HasFailure()) return;
    }
  }
}

/// As large as fits a device's memory in one dimension.
TEST(PlanWgmma, CountsLargeShapes) {
  const DeviceShape device;
  constexpr int kLarge = 2147483000;
  for (const auto& [m, n, k] : {std::array<int, 3>{1 << 24, 16384, 4096},
                                {1 << 30, 128, 128},
                                {1, kLarge - kLarge % 128, 128},
                                {300, 1 << 28, 64},
                                {1, 128, kLarge},
                                {1 << 20, 200000, 200000},
                                {200000, 200000, 4096}}) {
    for (const bool gated : {false, true}) {
      const TileProblem problem = {
          .m = m, .n = n, .k = k, .tile_bytes = TileCodeBytes(8) + kGroupBytes, .gated = gated};
      SCOPED_TRACE(Describe(problem, device));
      CheckWgmma(problem, device);
      EXPECT_EQ(PartialBytes(problem, 3), int64_t{4} * m * n * 3);
    }
  }
}

/// 52 of 448 tiles of 256 tokens are left after three waves: another would take as long as each.
TEST(PlanWgmma, LeavesFewItemsToNarrowTiles) {
  const DeviceShape device;
  TileProblem problem = {
      .m = 1024, .n = 14336, .k = 4096, .tile_bytes = TileCodeBytes(4) + kGroupBytes};
  const WgmmaPlan plan = PlanWgmma(problem, device);
  EXPECT_EQ(plan.tokens, 256);
  EXPECT_EQ(plan.arguments.items, 396);
  ASSERT_TRUE(plan.tail);
  EXPECT_EQ(plan.tail->tokens, 128);
  EXPECT_EQ(plan.tail->arguments.items, 104);
  // 16 are left of 544, and 128 pieces of 32 tokens are the soonest done.
  problem.m = 4352;
  problem.n = 4096;
  const WgmmaPlan quarters = PlanWgmmaAs(problem, device, {256, 1});
  ASSERT_TRUE(quarters.tail);
  EXPECT_EQ(quarters.tail->tokens, 32);
  // 124 of 256 fill the device almost.
  problem.m = 2048;
  EXPECT_FALSE(PlanWgmmaAs(problem, device, {256, 1}).tail);
  // A wave of few steps is done before another launch begins.
  problem.m = 4352;
  problem.k = 128;
  EXPECT_FALSE(PlanWgmmaAs(problem, device, {256, 1}).tail);
}

TEST(PlanWgmma, MakesClustersOfFewItems) {
  const DeviceShape device;
  const TileProblem few = {
      .m = 16, .n = 1024, .k = 16384, .tile_bytes = TileCodeBytes(4) + kGroupBytes};
  EXPECT_GT(PlanWgmma(few, device).arguments.splits, 1);
  DeviceShape without = device;
  for (int blocks = 2; blocks <= kMaxSplits; ++blocks) without.clusters[blocks - 1] = 0;
  const WgmmaPlan plan = PlanWgmma(few, without);
  EXPECT_GT(plan.arguments.splits, 1);
  EXPECT_FALSE(plan.arguments.in_cluster);
}

/// More items than clusters run at once: a cluster's next size down would leave a quarter of the
/// multiprocessors idle.
TEST(PlanWgmma, MeetsInMemoryWhereClustersAreTooFew) {
  const DeviceShape device;
  const TileProblem problem = {
      .m = 32, .n = 4096, .k = 14336, .tile_bytes = TileCodeBytes(4) + kGroupBytes};
  const WgmmaPlan plan = PlanWgmmaAs(problem, device, {32, 4});
  EXPECT_FALSE(plan.arguments.in_cluster);
  EXPECT_TRUE(plan.partials);
}

/// What was measured on an H200: 8 to 24 % less than without, but for the last four.
TEST(PlanWgmma, StreamsWhatWholeWavesLeave) {
  const DeviceShape device;
  struct Expected {
    int m, n, k, items, streamed;
  };
  for (const Expected& e : {Expected{32, 28672, 8192, 132, 92}, Expected{128, 28672, 8192, 132, 92},
                            Expected{32, 18944, 3584, 132, 16}, Expected{64, 10240, 8192, 0, 80},
                            Expected{256, 5120, 13824, 0, 80}, Expected{512, 13824, 5120, 132, 84},
                            Expected{32, 14336, 4096, 112, 0}, Expected{256, 14336, 4096, 112, 0},
                            Expected{32, 4096, 4096, 32, 0}, Expected{1024, 8192, 8192, 256, 0}}) {
    SCOPED_TRACE(testing::Message() << e.m << " x " << e.n << " x " << e.k);
    const WgmmaPlan plan = PlanWgmma(Fp4Problem(e.m, e.n, e.k), device);
    EXPECT_EQ(plan.arguments.items, e.items);
    EXPECT_EQ(plan.arguments.streamed, e.streamed);
  }
  TileProblem invariant = Fp4Problem(32, 28672, 8192);
  invariant.batch_invariant = true;
  EXPECT_EQ(PlanWgmma(invariant, device).arguments.streamed, 0);
  // Steps are counted exactly up to here.
  EXPECT_EQ(PlanWgmma(Fp4Problem(1, 128, 2147483000), device).arguments.streamed, 0);
}

/// The same rows in a larger batch: the order of a row's sums may not change.
TEST(WgmmaTakesLess, FromNineRowsOnWhereStripsDoNotFillTheDevice) {
  const DeviceShape device;
  // 288 strips are three for 24 blocks of 132.
  EXPECT_TRUE(WgmmaTakesLess(Fp4Problem(16, 9216, 4096), device));
  EXPECT_TRUE(WgmmaTakesLess(Fp4Problem(9, 9216, 4096), device));
  // By the estimates, which were compared from nine rows on alone, it would.
  EXPECT_FALSE(WgmmaTakesLess(Fp4Problem(8, 8704, 4096), device));
  EXPECT_FALSE(WgmmaTakesLess(Fp4Problem(16, 28672, 8192), device));
  // Sums would go to the workspace.
  EXPECT_FALSE(WgmmaTakesLess(Fp4Problem(16, 2048, 5120), device));
}

TEST(WgmmaTakesLess, IsNotSaidOfWhatWasNotMeasured) {
  const DeviceShape device;
  const TileProblem known = Fp4Problem(16, 9216, 4096);
  TileProblem problem = known;
  problem.gated = true;
  EXPECT_FALSE(WgmmaTakesLess(problem, device));
  problem = known;
  problem.batch_invariant = true;
  EXPECT_FALSE(WgmmaTakesLess(problem, device));
  problem = known;
  problem.pair_table = true;
  EXPECT_FALSE(WgmmaTakesLess(problem, device));
  problem = known;
  problem.narrow_codes = false;
  EXPECT_FALSE(WgmmaTakesLess(problem, device));
}

TEST(PlanWgmma, KeepsOneSplitWhereBatchesMayNotMatter) {
  const DeviceShape device;
  for (int m = 1; m <= 300; ++m) {
    const TileProblem problem = {.m = m,
                                 .n = 1024,
                                 .k = 100000,
                                 .tile_bytes = TileCodeBytes(4) + kGroupBytes,
                                 .gated = m % 2 == 0,
                                 .batch_invariant = true};
    EXPECT_EQ(PlanWgmma(problem, device).arguments.splits, 1) << m;
  }
}

TEST(CudaKernels, SayWhyTheyDecline) {
  GemmDesc desc;
  desc.m = 1;
  desc.n = desc.k = 256;
  desc.group_size = 128;
  desc.a_type = DType::kBf16;
  desc.tiled = desc.fits_f16 = true;
  const DeviceFacts facts = {.level = Isa::kSm90};
  const auto supported = [&](GemmDesc changed) {
    std::string names;
    for (const KernelDesc& kernel : CudaKernels()) {
      if (kernel.chosen == Chosen::kByName) continue;
      const Support support = kernel.supports(changed, facts);
      if (support.ok()) names += std::string(kernel.name).substr(sizeof("marlin_") - 1) + " ";
      EXPECT_NE(support.ok(), !support.reason.empty());
    }
    return names;
  };
  EXPECT_EQ(supported(desc), "gemv_mma gemm_wgmma gemm_cuda_exact ");
  GemmDesc rows = desc;
  rows.m = 17;
  EXPECT_EQ(supported(rows), "gemm_wgmma gemm_cuda_exact ");
  GemmDesc invariant = desc;
  invariant.determinism = Determinism::kBatchInvariant;
  EXPECT_EQ(supported(invariant), "gemm_wgmma gemm_cuda_exact ");
  GemmDesc canonical = desc;
  canonical.tiled = false;
  EXPECT_EQ(supported(canonical), "gemm_cuda_exact ");
  GemmDesc floats = desc;
  floats.a_type = DType::kF32;
  EXPECT_EQ(supported(floats), "gemm_cuda_exact ");
  floats.allow_bf16_activations = true;
  EXPECT_EQ(supported(floats), "gemv_mma gemm_wgmma gemm_cuda_exact ");
  EXPECT_TRUE(NeedsStaging(floats));
  EXPECT_FALSE(NeedsStaging(desc));
}

}  // namespace
}  // namespace marlin::cuda
