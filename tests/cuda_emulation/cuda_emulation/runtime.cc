#include "cuda_emulation/runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "cuda_emulation/block.h"

namespace cuda_emulation {

namespace {

/// In this many turns of polls alone, something would have come.
constexpr int kMostIdleTurns = 10000;
/// Blocks that run at the same time where the order is random. More of them do where they poll.
constexpr size_t kMostInterleaved = 4;
/// Stacks that stay mapped.
constexpr size_t kMostSpares = 4;

using Stacks = std::unique_ptr<metal_sim::FiberStacks>;

std::vector<Stacks>& SpareStacks() {
  static std::vector<Stacks> spares;
  return spares;
}

/// A block and the stacks of its threads.
struct LiveBlock {
  Stacks stacks;
  std::unique_ptr<Block> block;
};

class Launch {
 public:
  explicit Launch(const Shape& shape)
      : shape_(shape), random_(shape.seed), order_(shape.grid.x * shape.grid.y * shape.grid.z) {
    std::iota(order_.begin(), order_.end(), 0u);
    if (shape.seed != 0) std::shuffle(order_.begin(), order_.end(), random_);
    std::reverse(order_.begin(), order_.end());
  }

  std::string Run() {
    int idle_turns = 0;
    while (!live_.empty() || !order_.empty()) {
      const size_t most_live = shape_.seed == 0 ? 1 : kMostInterleaved;
      const bool starts = !order_.empty() && (live_.size() < most_live || idle_turns > 0);
      if (starts) Start();
      const int64_t before = progress_;
      for (size_t i = 0; i < live_.size();) {
        const std::string finding = RunOne(i);
        if (!finding.empty()) return finding;
        if (live_[i].block == nullptr) {
          live_.erase(live_.begin() + static_cast<ptrdiff_t>(i));
        } else {
          ++i;
        }
      }
      idle_turns = starts || progress_ != before ? 0 : idle_turns + 1;
      if (idle_turns > kMostIdleTurns) {
        return Name(*live_[0].block) +
               "polls what no block writes: " + live_[0].block->DescribeWaits() + "\n";
      }
    }
    return {};
  }

 private:
  static std::string Name(const Block& block) {
    return "block " + std::to_string(block.index().x) + " " + std::to_string(block.index().y) +
           " " + std::to_string(block.index().z) + ": ";
  }

  void Start() {
    const unsigned number = order_.back();
    order_.pop_back();
    LiveBlock live;
    if (SpareStacks().empty()) {
      live.stacks = std::make_unique<metal_sim::FiberStacks>();
    } else {
      live.stacks = std::move(SpareStacks().back());
      SpareStacks().pop_back();
    }
    if (!live.stacks->Place(shape_.block.x * shape_.block.y * shape_.block.z).ok()) std::abort();
    const uint3 index = {number % shape_.grid.x, number / shape_.grid.x % shape_.grid.y,
                         number / (shape_.grid.x * shape_.grid.y)};
    live.block = std::make_unique<Block>(shape_, index, live.stacks.get(),
                                         shape_.seed == 0 ? nullptr : &random_);
    live_.push_back(std::move(live));
  }

  /// Returns a finding. Frees the block if it has ended.
  std::string RunOne(size_t i) {
    Block& block = *live_[i].block;
    const int64_t before = block.progress();
    const Block::Outcome outcome = block.Run();
    progress_ += block.progress() - before;
    if (outcome == Block::Outcome::kFailed) return Name(block) + block.finding() + "\n";
    if (outcome == Block::Outcome::kEnded) {
      live_[i].block.reset();
      if (SpareStacks().size() < kMostSpares) SpareStacks().push_back(std::move(live_[i].stacks));
    }
    return {};
  }

  const Shape& shape_;
  Block::Random random_;
  std::vector<unsigned> order_;  ///< The blocks that have not started, the last first.
  std::vector<LiveBlock> live_;
  int64_t progress_ = 0;
};

}  // namespace

std::string Run(const Shape& given, const std::function<void()>& thread) {
  Shape shape = given;
  const char* const seed = std::getenv("MARLIN_CUDA_EMULATION_SEED");
  if (shape.seed == 0 && seed != nullptr) shape.seed = static_cast<uint32_t>(std::atoi(seed));
  SetKernel(&thread);
  blockDim = shape.block;
  gridDim = shape.grid;
  return Launch(shape).Run();
}

void Fail(std::string finding) { RunningBlock().Fail(std::move(finding)); }
int Lane() { return RunningBlock().current().number % 32; }

void* DynamicShared() { return RunningBlock().dynamic_shared(); }
void* StaticShared(const void* key, size_t bytes, size_t alignment) {
  return RunningBlock().StaticShared(key, bytes, alignment);
}
uint32_t SharedAddress(const void* pointer) { return RunningBlock().SharedAddress(pointer); }
std::byte* SharedBytes(const char* what, uint32_t address, int bytes, int alignment) {
  return RunningBlock().SharedBytes(what, address, bytes, alignment);
}

void* const* Join(const char* what, uint32_t mask, void* mine) {
  return RunningBlock().Join(what, mask, mine);
}
void Leave() { RunningBlock().Leave(); }

Votes Sync(const char* what, int barrier, int threads, bool vote) {
  return RunningBlock().Sync(what, barrier, threads, vote, true);
}
void ArriveAtBarrier(const char* what, int barrier, int threads) {
  RunningBlock().Sync(what, barrier, threads, false, false);
}

void InitBarrier(const char* what, uint32_t barrier, int arrivals) {
  RunningBlock().InitBarrier(what, barrier, arrivals);
}
void Arrive(const char* what, uint32_t barrier, int bytes) {
  RunningBlock().Arrive(what, barrier, bytes);
}
void Wait(const char* what, uint32_t barrier, int parity) {
  RunningBlock().Wait(what, barrier, parity);
}

void CopyAsync(const char* what, uint32_t to, const void* from, int bytes, int size) {
  std::byte* const place = SharedBytes(what, to, size, size);
  const bool aligned = reinterpret_cast<uintptr_t>(from) % static_cast<uintptr_t>(size) == 0;
  if (bytes < 0 || bytes > size || !aligned) Fail(std::string(what) + ": bytes or alignment");
  std::memset(place, 0xff, static_cast<size_t>(size));
  Thread& thread = RunningBlock().current();
  thread.copies.push_back(
      {place, static_cast<const std::byte*>(from), bytes, size, thread.copies_issued++});
}
void CommitCopies() {
  Thread& thread = RunningBlock().current();
  thread.groups.push_back(thread.copies_issued);
}
void WaitForCopies(int groups_left) {
  Thread& thread = RunningBlock().current();
  const size_t left = static_cast<size_t>(groups_left);
  if (thread.groups.size() <= left) return;
  Block::PerformCopies(&thread, thread.groups[thread.groups.size() - 1 - left]);
}
void WaitForAllCopies() {
  Thread& thread = RunningBlock().current();
  Block::PerformCopies(&thread, thread.copies_issued);
}
void ArriveWithCopies(const char* what, uint32_t barrier) {
  RunningBlock().ArriveWithCopies(what, barrier);
}
void CopyBulk(const char* what, uint32_t to, const void* from, int bytes, uint32_t barrier) {
  RunningBlock().CopyBulk(what, to, from, bytes, barrier);
}
void Poll(const char* what) { RunningBlock().Poll(what); }

}  // namespace cuda_emulation
