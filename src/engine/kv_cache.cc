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

int64_t CacheTokenBytes(const DecoderConfig& config, DType type) {
  Checked elements(0);
  for (const LayerState& layer : CacheShape::Of(config, type).layers) {
    elements = elements + Checked(layer.kept.elements());
  }
  return SaturatingProduct(elements.Take().value_or(INT64_MAX), DTypeBytes(type));
}

KvCache::KvCache(std::shared_ptr<PagePool> pool, bool truncatable)
    : pool_(std::move(pool)), truncatable_(truncatable), blocks_(pool_->groups()) {}

KvCache::~KvCache() {
  ReturnFrom(0);
  pool_->Leave(&place_, -1);
}

int64_t KvCache::ShortestLength() const {
  int64_t shortest = 0;
  for (size_t group = 0; group < blocks_.size(); ++group) {
    const auto is_there = [](int32_t page) { return page >= 0; };
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
  for (const std::vector<int32_t>& blocks : blocks_) most = std::max(most, blocks.size());
  // The last block of all groups first, so that its cached pages are evicted first.
  for (size_t at = most; at-- > block;) {
    for (size_t group = 0; group < blocks_.size(); ++group) {
      std::vector<int32_t>& blocks = blocks_[group];
      if (at >= blocks.size()) continue;
      if (blocks[at] >= 0) pool_->Return(group, blocks[at]);
      blocks.pop_back();
    }
  }
}

void KvCache::Truncate(int64_t length) {
  if (length < PublishedLength()) {
    // Published pages keep their tokens: the sequence goes on in pages of its own.
    const int64_t block = length / pool_->page_tokens();
    ReturnFrom(static_cast<size_t>(block));
    pool_->Leave(&place_, block);
  }
  length_ = length;
  if (length > 0) return;
  for (std::vector<int32_t>& blocks : blocks_) {
    // Erase dropped blocks, so that block 0 has a page again; no page holds a position any more.
    const auto dropped =
        std::find_if(blocks.begin(), blocks.end(), [](int32_t p) { return p >= 0; });
    blocks.erase(blocks.begin(), dropped);
  }
}

int64_t KvCache::Adopt(std::span<const int32_t> tokens, std::string_view salt) {
  if (place_.node == nullptr && length_ == 0) place_ = pool_->Begin(salt);
  if (place_.node == nullptr || PublishedLength() != length_) return 0;
  Release(length_);
  pool_->Adopt(tokens, &place_, &blocks_);
  return PublishedLength() - std::exchange(length_, PublishedLength());
}

void KvCache::Publish(std::span<const int32_t> tokens) {
  if (place_.node == nullptr) return;
  const int64_t fed = std::min(length_, static_cast<int64_t>(tokens.size()));
  pool_->Publish(tokens.first(static_cast<size_t>(fed)), &place_, &blocks_);
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

Status KvCache::Reserve(int64_t position, int64_t end) {
  for (size_t group = 0; group < blocks_.size(); ++group) {
    if (!truncatable_) DropUnseen(group, position);
    std::vector<int32_t>& blocks = blocks_[group];
    const int64_t wanted = CeilDivide(end, pool_->page_tokens());
    while (static_cast<int64_t>(blocks.size()) < wanted) {
      blocks.reserve(blocks.size() + 1);
      MARLIN_ASSIGN_OR_RETURN(const int32_t page, pool_->Take(group));
      blocks.push_back(page);
    }
  }
  return {};
}

void KvCache::Release(int64_t end) {
  ReturnFrom(static_cast<size_t>(CeilDivide(end, pool_->page_tokens())));
}

}  // namespace marlin
