#include "engine/kv_cache.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"

namespace marlin {
namespace {

struct CacheTypeName {
  DType type;
  std::string_view name;
};
constexpr CacheTypeName kCacheTypes[] = {
    {DType::kF32, "f32"}, {DType::kBf16, "bf16"}, {DType::kF8E4M3, "fp8_e4m3"}};

Status NoCacheType(std::string_view name) {
  return Status(Code::kInvalidArgument,
                fmt::format("expected f32, bf16 or fp8_e4m3, got '{}'", Printable(name)));
}

}  // namespace

Result<DType> ParseKvCacheType(std::string_view name) {
  for (const CacheTypeName& known : kCacheTypes) {
    if (known.name == name) return known.type;
  }
  return NoCacheType(name);
}

std::string_view KvCacheTypeName(DType type) {
  for (const CacheTypeName& known : kCacheTypes) {
    if (known.type == type) return known.name;
  }
  return "unknown";
}

Result<DType> CacheType(const ModelOptions& options) {
  if (!options.kv_cache) return options.allow_bf16_activations ? DType::kBf16 : DType::kF32;
  const DType type = *options.kv_cache;
  if (KvCacheTypeName(type) != "unknown") return type;
  return NoCacheType(DTypeName(type)).WithContext("kv_cache");
}

int64_t CacheTokenBytes(const DecoderConfig& config, DType type, int64_t first) {
  Checked elements(0);
  const CacheShape shape = CacheShape::Of(config, type);
  for (const LayerState& layer : std::span(shape.layers).subspan(static_cast<size_t>(first))) {
    elements = elements + Checked(layer.kept.elements());
  }
  return SaturatingProduct(elements.Take().value_or(INT64_MAX), DTypeBytes(type));
}

int64_t StateBytes(const DecoderConfig& config, int64_t first) {
  Checked elements(0);
  const CacheShape shape = CacheShape::Of(config, DType::kF32);
  for (const LayerState& layer : std::span(shape.layers).subspan(static_cast<size_t>(first))) {
    elements = elements + Checked(layer.kept.fixed);
  }
  return SaturatingProduct(elements.Take().value_or(INT64_MAX), DTypeBytes(DType::kF32));
}

int64_t ReservedCacheBytes(const DecoderConfig& config, DType type, int64_t first) {
  const int64_t tokens = SaturatingProduct(CacheTokenBytes(config, type, first),
                                           std::min(config.max_positions, kReservedTokens));
  // A sequence that is fed has two states.
  const Checked with_states = Checked(tokens) + Checked(2) * Checked(StateBytes(config, first));
  return with_states.Take().value_or(INT64_MAX);
}

KvCache::KvCache(std::shared_ptr<PagePool> pool, bool truncatable)
    : pool_(std::move(pool)), truncatable_(truncatable), blocks_(pool_->groups()) {
  for (size_t group = 0; group < blocks_.size(); ++group) {
    if (pool_->IsRecurrent(group)) blocks_[group].assign(kStatePages, -1);
  }
}

KvCache::~KvCache() {
  ReturnFrom(0);
  for (size_t group = 0; group < blocks_.size(); ++group) {
    if (!pool_->IsRecurrent(group)) continue;
    static_cast<void>(ResizeGuesses(group, 0));
    for (const StatePage which : {kState, kNextState, kKeptState}) SetState(group, which, -1);
  }
  pool_->Leave(&place_, -1);
}

void KvCache::SetState(size_t group, StatePage which, int32_t page) {
  if (page >= 0) pool_->Share(group, page);
  const int32_t before = std::exchange(blocks_[group][which], page);
  if (before >= 0) pool_->Return(group, before);
}

void KvCache::KeepStates() {
  for (size_t group = 0; group < blocks_.size(); ++group) {
    if (pool_->IsRecurrent(group)) SetState(group, kKeptState, blocks_[group][kState]);
  }
  kept_length_ = length_;
}

void KvCache::Grow(int64_t length) {
  for (size_t group = 0; group < blocks_.size(); ++group) {
    if (!pool_->IsRecurrent(group)) continue;
    std::vector<int32_t>& pages = blocks_[group];
    if (length > length_) {
      const size_t after = PlaceAfter(drafts_ == 0 ? 0 : length - length_ - 1);
      SetState(group, kState, -1);
      pages[kState] = std::exchange(pages[after], -1);
      // The other guesses' pages serve the next ones.
      if (after >= kStatePages) pages.erase(pages.begin() + static_cast<std::ptrdiff_t>(after));
    } else {
      static_cast<void>(ResizeGuesses(group, 0));
    }
    if (pages[kNextState] >= 0) pool_->Return(group, pages[kNextState]);
    SetNextState(group, -1);
  }
  length_ = length;
}

Status KvCache::ResizeGuesses(size_t group, int64_t drafts) {
  std::vector<int32_t>& pages = blocks_[group];
  const size_t wanted = kStatePages + static_cast<size_t>(drafts);
  for (; pages.size() > wanted; pages.pop_back()) pool_->Return(group, pages.back());
  pages.reserve(wanted);
  while (pages.size() < wanted) {
    MARLIN_ASSIGN_OR_RETURN(const int32_t page, pool_->Take(group));
    pages.push_back(page);
  }
  return {};
}

void KvCache::SetNextState(size_t group, int32_t page) {
  blocks_[group][kNextState] = page;
  blocks_[group][kContinued] = page;
}

std::span<const int32_t> KvCache::TableFrom(size_t group, int64_t position) const {
  const std::span<const int32_t> table = blocks_[group];
  if (!pool_->IsRecurrent(group)) return table;
  return table.subspan(position == length_ ? kState : kNextState, 2);
}

std::array<int32_t, 2> KvCache::TableOfRow(size_t group, int64_t row) const {
  const std::vector<int32_t>& pages = blocks_[group];
  return {pages[row == 0 ? size_t{kState} : PlaceAfter(row - 1)], pages[PlaceAfter(row)]};
}

int64_t KvCache::ShortestLength() const {
  int64_t shortest = 0;
  for (size_t group = 0; group < blocks_.size(); ++group) {
    const auto is_there = [](int32_t page) { return page >= 0; };
    if (pool_->IsRecurrent(group)) continue;
    const std::vector<int32_t>& blocks = blocks_[group];
    const auto dropped = std::find_if(blocks.begin(), blocks.end(), is_there) - blocks.begin();
    if (dropped == 0) continue;
    const int64_t first = int64_t{dropped} * pool_->page_tokens();
    shortest = std::max(shortest, first + pool_->WindowOf(group) - 1);
  }
  return shortest;
}

int64_t KvCache::PublishedLength() const { return place_.blocks * pool_->page_tokens(); }

bool KvCache::DividesPublished(int64_t length) const {
  return length < PublishedLength() && length % pool_->page_tokens() != 0;
}

void KvCache::ReturnFrom(size_t block) {
  size_t most = 0;
  for (size_t group = 0; group < blocks_.size(); ++group) {
    if (!pool_->IsRecurrent(group)) most = std::max(most, blocks_[group].size());
  }
  // The last block of all groups first, so that its cached pages are evicted first.
  for (size_t at = most; at-- > block;) {
    for (size_t group = 0; group < blocks_.size(); ++group) {
      std::vector<int32_t>& blocks = blocks_[group];
      if (at >= blocks.size() || pool_->IsRecurrent(group)) continue;
      if (blocks[at] >= 0) pool_->Return(group, blocks[at]);
      blocks.pop_back();
    }
  }
}

bool KvCache::RestoreStates(int64_t length) {
  if (length == length_ || !pool_->HasStates()) return true;
  const int64_t tokens = pool_->page_tokens();
  if (length > 0 && length != kept_length_) {
    const bool may_be_published = length <= PublishedLength() && length % tokens == 0;
    if (!may_be_published || !pool_->Restore(place_, length / tokens, &blocks_)) return false;
  }
  for (size_t group = 0; group < blocks_.size(); ++group) {
    if (!pool_->IsRecurrent(group)) continue;
    if (length == 0) SetState(group, kState, -1);
    if (length > 0 && length == kept_length_) SetState(group, kState, blocks_[group][kKeptState]);
    if (length < kept_length_) SetState(group, kKeptState, -1);
  }
  if (length < kept_length_) kept_length_ = 0;
  return true;
}

bool KvCache::Truncate(int64_t length) {
  if (!RestoreStates(length)) return false;
  if (length < PublishedLength()) {
    // Published pages keep their tokens: the sequence goes on in pages of its own.
    const int64_t block = length / pool_->page_tokens();
    ReturnFrom(static_cast<size_t>(block));
    pool_->Leave(&place_, block);
  }
  length_ = length;
  if (length > 0) return true;
  for (size_t group = 0; group < blocks_.size(); ++group) {
    if (pool_->IsRecurrent(group)) continue;
    std::vector<int32_t>& blocks = blocks_[group];
    // Erase dropped blocks, so that block 0 has a page again; no page holds a position any more.
    const auto dropped =
        std::find_if(blocks.begin(), blocks.end(), [](int32_t p) { return p >= 0; });
    blocks.erase(blocks.begin(), dropped);
  }
  return true;
}

int64_t KvCache::Adopt(std::span<const int32_t> tokens, std::string_view salt) {
  if (place_.node == nullptr && length_ == 0) place_ = pool_->Begin(salt);
  if (place_.node == nullptr || PublishedLength() != length_) return 0;
  Release(length_);
  pool_->Adopt(tokens, &place_, &blocks_);
  return PublishedLength() - std::exchange(length_, PublishedLength());
}

void KvCache::Publish(std::span<const int32_t> tokens, bool with_states) {
  if (place_.node == nullptr) return;
  const int64_t fed = std::min(length_, static_cast<int64_t>(tokens.size()));
  pool_->Publish(tokens.first(static_cast<size_t>(fed)), with_states && fed == length_, &place_,
                 &blocks_);
}

void KvCache::DropUnseen(size_t group, int64_t position) {
  const int64_t seen = pool_->FirstSeen(group, position);
  const int64_t seen_before = pool_->FirstSeen(group, length_);
  const int64_t tokens = pool_->page_tokens();
  std::vector<int32_t>& blocks = blocks_[group];
  for (size_t block = 0; block < blocks.size(); ++block) {
    const int64_t begin = static_cast<int64_t>(block) * tokens;
    if (begin + tokens > seen) break;
    const bool repeatable = begin < length_ && begin + tokens > seen_before;
    if (blocks[block] < 0 || repeatable) continue;
    pool_->Return(group, blocks[block]);
    blocks[block] = -1;
  }
}

Status KvCache::Reserve(int64_t position, int64_t end, int64_t drafts) {
  drafts_ = std::max<int64_t>(drafts, 0);
  for (size_t group = 0; group < blocks_.size(); ++group) {
    std::vector<int32_t>& blocks = blocks_[group];
    if (pool_->IsRecurrent(group)) {
      if (drafts != kNoDrafts) MARLIN_RETURN_IF_ERROR(ResizeGuesses(group, drafts));
      if (end == position || blocks[kNextState] >= 0) continue;
      MARLIN_ASSIGN_OR_RETURN(const int32_t page, pool_->Take(group));
      SetNextState(group, page);
      continue;
    }
    if (!truncatable_) DropUnseen(group, position);
    const int64_t wanted = CeilDivide(end, pool_->page_tokens());
    while (static_cast<int64_t>(blocks.size()) < wanted) {
      blocks.reserve(blocks.size() + 1);
      MARLIN_ASSIGN_OR_RETURN(const int32_t page, pool_->Take(group));
      blocks.push_back(page);
    }
  }
  return {};
}

bool KvCache::DropGuesses() {
  bool dropped = false;
  for (size_t group = 0; group < blocks_.size(); ++group) {
    if (!pool_->IsRecurrent(group)) continue;
    dropped |= blocks_[group].size() > kStatePages;
    static_cast<void>(ResizeGuesses(group, 0));
  }
  return dropped;
}

void KvCache::Release(int64_t end) {
  ReturnFrom(static_cast<size_t>(CeilDivide(end, pool_->page_tokens())));
  if (end <= length_) Grow(length_);
}

}  // namespace marlin
