#include "cuda_emulation/block.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>

namespace cuda_emulation {
namespace {

constexpr size_t kSharedAlignment = 1024;
constexpr size_t kStaticBytes = size_t{64} << 10;
/// The shared window begins here, so that the address 0 is a finding.
constexpr uint32_t kWindow = 1024;
/// In memory that nothing was written to: NaN in every type.
constexpr int kPoison = 0xff;
/// The content of shared memory where an mbarrier is.
constexpr uint64_t kBarrierBits = 0xb0a7b0a7b0a7b0a7u;

/// Where the order is random: of warps and blocks, in threads that run until they give way.
constexpr unsigned kLengthOfTurns = 300;

Block* running = nullptr;
const std::function<void()>* kernel_thread = nullptr;

std::string Hex(uint32_t number) {
  char digits[16];
  std::snprintf(digits, sizeof(digits), "0x%x", number);
  return digits;
}

size_t RoundUp(size_t number, size_t unit) { return (number + unit - 1) / unit * unit; }

}  // namespace

Block& RunningBlock() {
  if (running == nullptr) std::abort();  // Device code that needs a launch.
  return *running;
}

void SetKernel(const std::function<void()>* thread) { kernel_thread = thread; }

void PendingCopy::Perform() const {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  std::memset(to + bytes, 0, static_cast<size_t>(size - bytes));
}

Block::Block(const Shape& shape, uint3 index, metal_sim::FiberStacks* stacks, Random* random)
    : shape_(shape),
      index_(index),
      random_(random),
      thread_count_(static_cast<int>(shape.block.x * shape.block.y * shape.block.z)) {
  static_begin_ = RoundUp(static_cast<size_t>(shape.shared_bytes), kSharedAlignment);
  static_end_ = static_begin_;
  memory_.resize(static_begin_ + kStaticBytes + kSharedAlignment);
  std::memset(memory_.data(), kPoison, memory_.size());
  shared_ = memory_.data() +
            (kSharedAlignment - reinterpret_cast<uintptr_t>(memory_.data()) % kSharedAlignment);
  const auto warps = static_cast<size_t>(thread_count_ + 31) / 32;
  collectives_.resize(warps);
  ready_.resize(warps);
  order_.resize(warps);
  std::iota(order_.begin(), order_.end(), size_t{0});
  threads_ = std::make_unique<Thread[]>(static_cast<size_t>(thread_count_));
  for (int i = 0; i < thread_count_; ++i) {
    Thread& thread = threads_[static_cast<size_t>(i)];
    const auto number = static_cast<unsigned>(i);
    thread.number = i;
    thread.index = {number % shape.block.x, number / shape.block.x % shape.block.y,
                    number / (shape.block.x * shape.block.y)};
    thread.fiber.Start(stacks->Bottom(number), stacks->usable_bytes(), [] { (*kernel_thread)(); });
    MakeReady(&thread);
  }
}

Thread* Block::TakeReady() {
  if (random_ != nullptr && (*random_)() % kLengthOfTurns == 0) {
    std::shuffle(order_.begin(), order_.end(), *random_);
  }
  const size_t warp = *std::find_if(order_.begin(), order_.end(),
                                    [this](size_t one) { return !ready_[one].empty(); });
  std::deque<Thread*>& of_warp = ready_[warp];
  if (random_ != nullptr) std::swap(of_warp.front(), of_warp[(*random_)() % of_warp.size()]);
  Thread* const thread = of_warp.front();
  of_warp.pop_front();
  --ready_count_;
  return thread;
}

Block::Outcome Block::Run() {
  running = this;
  blockIdx = index_;
  for (;;) {
    if (random_ != nullptr && (*random_)() % kLengthOfTurns == 0) return Outcome::kPaused;
    if (ready_count_ == 0) {
      if (ended_ == thread_count_) return Outcome::kEnded;
      if (Deliver()) continue;
      for (Thread* thread : std::exchange(polling_, {})) MakeReady(thread);
      if (ready_count_ > 0) return Outcome::kPaused;
      finding_ = "all threads wait: " + DescribeWaits();
      return Outcome::kFailed;
    }
    current_ = TakeReady();
    threadIdx = current_->index;
    if (current_->fiber.Resume()) {
      current_->ended = true;
      ++ended_;
      ++progress_;
      NamedBarrier& all = barriers_[0];
      if (!all.waiting.empty() && all.expected == 0 && all.arrived == thread_count_ - ended_) {
        CompleteBarrier(&all);
      }
    }
    if (!finding_.empty()) return Outcome::kFailed;
  }
}

void Block::Fail(std::string finding) {
  if (finding_.empty()) {
    finding_ = "thread " + std::to_string(current_->number) + ": " + finding;
  }
  // The fiber is left for good, without destructors.
  std::string().swap(finding);
  for (;;) current_->fiber.GiveWay();
}

void Block::GiveWay(const char* instruction, const char* of, uint32_t operand) {
  current_->instruction = instruction;
  current_->of = of;
  current_->operand = operand;
  current_->fiber.GiveWay();
}

void Block::MakeReady(Thread* thread) {
  ready_[static_cast<size_t>(thread->number) / 32].push_back(thread);
  ++ready_count_;
}

void Block::Release(Thread* thread) {
  ++progress_;
  MakeReady(thread);
}

std::string Block::DescribeWaits() const {
  std::map<std::pair<int, std::string>, uint32_t> lanes;
  for (int i = 0; i < thread_count_; ++i) {
    const Thread& thread = threads_[static_cast<size_t>(i)];
    const std::string wait = std::string(thread.instruction) + thread.of + Hex(thread.operand);
    lanes[{i / 32, thread.ended ? "ended" : wait}] |= 1u << (i % 32);
  }
  std::string text;
  for (const auto& [place, mask] : lanes) {
    text += "\n  warp " + std::to_string(place.first) + " lanes " + Hex(mask) + ": " + place.second;
  }
  return text;
}

// Shared memory.

void* Block::StaticShared(const void* key, size_t bytes, size_t alignment) {
  const auto found = static_places_.find(key);
  if (found != static_places_.end()) return shared_ + found->second;
  const size_t place = RoundUp(static_end_, alignment);
  if (place + bytes > static_begin_ + kStaticBytes) Fail("too much static shared memory");
  static_end_ = place + bytes;
  static_places_[key] = place;
  return shared_ + place;
}

uint32_t Block::SharedAddress(const void* pointer) {
  const auto place = static_cast<const std::byte*>(pointer) - shared_;
  if (place < 0 || place > static_cast<ptrdiff_t>(static_end_)) Fail("not in shared memory");
  return kWindow + static_cast<uint32_t>(place);
}

std::byte* Block::SharedBytes(const char* what, uint32_t address, int bytes, int alignment) {
  const size_t begin = address - kWindow;
  const size_t end = begin + static_cast<size_t>(bytes);
  const bool inside = end <= static_cast<size_t>(shape_.shared_bytes) ||
                      (begin >= static_begin_ && end <= static_end_);
  if (address < kWindow || !inside) {
    Fail(std::string(what) + ": address " + Hex(address) + ", " + std::to_string(begin) +
         " bytes into shared memory, is outside of it");
  }
  if (address % static_cast<uint32_t>(alignment) != 0) {
    Fail(std::string(what) + ": address " + Hex(address) + " is not a multiple of " +
         std::to_string(alignment));
  }
  return shared_ + begin;
}

// Warp collectives.

void* const* Block::Join(const char* what, uint32_t mask, void* mine) {
  const int lane = current_->number % 32;
  auto& of_warp = collectives_[static_cast<size_t>(current_->number) / 32];
  if ((mask >> lane & 1u) == 0) Fail(std::string(what) + ": the mask is without the lane");
  auto found = std::find_if(of_warp.begin(), of_warp.end(), [&](const Collective& one) {
    return one.mask == mask && std::strcmp(one.what, what) == 0 && (one.arrived >> lane & 1u) == 0;
  });
  if (found == of_warp.end()) {
    of_warp.push_back({.what = what, .mask = mask});
    found = of_warp.end() - 1;
  }
  found->arrived |= 1u << lane;
  found->data[static_cast<size_t>(lane)] = mine;
  if (found->arrived == mask) {
    std::iter_swap(found, of_warp.end() - 1);
    return of_warp.back().data.data();
  }
  GiveWay(what, " of lanes ", mask);
  return nullptr;
}

void Block::Leave() {
  const int warp = current_->number / 32;
  auto& of_warp = collectives_[static_cast<size_t>(warp)];
  const uint32_t mask = of_warp.back().mask;
  of_warp.pop_back();
  for (int lane = 0; lane < 32; ++lane) {
    const int number = warp * 32 + lane;
    if ((mask >> lane & 1u) != 0 && number != current_->number) {
      Release(&threads_[static_cast<size_t>(number)]);
    }
  }
}

// Barriers.

void Block::CompleteBarrier(NamedBarrier* barrier) {
  for (Thread* thread : barrier->waiting) {
    thread->votes = barrier->votes;
    Release(thread);
  }
  *barrier = {};
}

Votes Block::Sync(const char* what, int barrier, int threads, bool vote, bool waits) {
  if (barrier < 0 || barrier >= 16 || threads % 32 != 0) Fail(std::string(what) + ": no barrier");
  NamedBarrier& at = barriers_[static_cast<size_t>(barrier)];
  if (at.arrived > 0 && at.expected != threads) {
    Fail(std::string(what) + ": barrier " + std::to_string(barrier) + " of " +
         std::to_string(threads) + " threads, but others are at one of " +
         std::to_string(at.expected));
  }
  at.expected = threads;
  ++at.arrived;
  ++at.votes.all;
  if (vote) ++at.votes.yes;
  const bool complete = at.arrived == (threads == 0 ? thread_count_ - ended_ : threads);
  if (complete) {
    const Votes votes = at.votes;
    CompleteBarrier(&at);
    return votes;
  }
  if (!waits) return {};
  at.waiting.push_back(current_);
  Thread* const me = current_;
  GiveWay(what, " of barrier ", static_cast<uint32_t>(barrier));
  return me->votes;
}

// mbarriers.

Block::MemoryBarrier& Block::BarrierAt(const char* what, uint32_t address) {
  uint64_t bits = 0;
  std::memcpy(&bits, SharedBytes(what, address, 8, 8), 8);
  const auto found = memory_barriers_.find(address);
  if (found == memory_barriers_.end()) {
    Fail(std::string(what) + ": no mbarrier was initialized at " + Hex(address));
  }
  if (bits != kBarrierBits) Fail(std::string(what) + ": the mbarrier was overwritten");
  return found->second;
}

void Block::InitBarrier(const char* what, uint32_t barrier, int arrivals) {
  std::memcpy(SharedBytes(what, barrier, 8, 8), &kBarrierBits, 8);
  if (!memory_barriers_[barrier].waiting.empty()) Fail(std::string(what) + ": threads wait at it");
  memory_barriers_[barrier] = MemoryBarrier{arrivals, arrivals, 0, 0, {}, {}};
}

void Block::CompletePhase(MemoryBarrier* barrier) {
  if (barrier->pending > 0 || barrier->bytes != 0) return;
  barrier->pending = barrier->arrivals;
  ++barrier->phase;
  for (Thread* thread : std::exchange(barrier->waiting, {})) Release(thread);
}

void Block::Arrive(const char* what, uint32_t barrier, int bytes) {
  MemoryBarrier& at = BarrierAt(what, barrier);
  at.bytes += bytes;
  --at.pending;
  CompletePhase(&at);
}

void Block::Wait(const char* what, uint32_t barrier, int parity) {
  // As on the hardware, a thread that two phases have passed waits on.
  while (BarrierAt(what, barrier).phase % 2 == parity) {
    BarrierAt(what, barrier).waiting.push_back(current_);
    GiveWay(what, parity == 0 ? " for parity 0 of offset " : " for parity 1 of offset ",
            barrier - kWindow);
  }
}

// Asynchronous copies.

void Block::PerformCopies(Thread* thread, int64_t before) {
  auto& copies = thread->copies;
  const auto left = std::find_if(copies.begin(), copies.end(), [before](const PendingCopy& copy) {
    return copy.number >= before;
  });
  std::for_each(copies.begin(), left, [](const PendingCopy& copy) { copy.Perform(); });
  copies.erase(copies.begin(), left);
}

void Block::ArriveWithCopies(const char* what, uint32_t barrier) {
  BarrierAt(what, barrier)
      .on_the_way.push_back({.thread = current_, .copies = current_->copies_issued});
}

void Block::CopyBulk(const char* what, uint32_t to, const void* from, int bytes, uint32_t barrier) {
  std::byte* const place = SharedBytes(what, to, bytes, 16);
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    Fail(std::string(what) + ": not whole, aligned 16 bytes");
  }
  std::memset(place, kPoison, static_cast<size_t>(bytes));
  BarrierAt(what, barrier)
      .on_the_way.push_back(
          {.bulk = {place, static_cast<const std::byte*>(from), bytes, bytes, 0}});
}

void Block::Deliver(MemoryBarrier* barrier) {
  for (const Arrival& arrival : std::exchange(barrier->on_the_way, {})) {
    if (arrival.thread != nullptr) {
      PerformCopies(arrival.thread, arrival.copies);
      --barrier->pending;
    } else {
      arrival.bulk.Perform();
      barrier->bytes -= arrival.bulk.bytes;
    }
    CompletePhase(barrier);
  }
}

/// Lets copies arrive at the first mbarrier for which threads wait. Returns whether there are any.
bool Block::Deliver() {
  for (auto& [address, barrier] : memory_barriers_) {
    if (!barrier.waiting.empty() && !barrier.on_the_way.empty()) {
      Deliver(&barrier);
      return true;
    }
  }
  return false;
}

void Block::Poll(const char* what) {
  polling_.push_back(current_);
  GiveWay(what, "", 0);
}

}  // namespace cuda_emulation
