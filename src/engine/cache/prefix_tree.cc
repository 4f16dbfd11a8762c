#include "engine/cache/prefix_tree.h"

#include <algorithm>
#include <random>
#include <utility>

namespace marlin {
namespace {

uint64_t RandomSeed() {
  std::random_device random;
  return (uint64_t{random()} << 32U) | random();
}

}  // namespace

uint64_t PrefixTree::HashOf(uint64_t parent, std::span<const int32_t> tokens) {
  uint64_t hash = parent;
  for (const int32_t token : tokens) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x9e3779b97f4a7c15U;
    hash ^= hash >> 32U;
  }
  return hash;
}

PrefixTree::PrefixTree(size_t groups, Hash hash)
    : groups_(groups), hash_(hash), seed_(RandomSeed()) {}

uint64_t PrefixTree::KeyOf(const PrefixNode* parent, std::span<const int32_t> tokens) const {
  return hash_(parent == nullptr ? seed_ : parent->key, tokens);
}

PrefixNode* PrefixTree::UseRoot(std::string_view salt) {
  const std::vector<int32_t> bytes(salt.begin(), salt.end());
  return Use(nullptr, bytes);
}

PrefixNode* PrefixTree::Find(PrefixNode* parent, std::span<const int32_t> tokens) const {
  const auto [begin, end] = nodes_.equal_range(KeyOf(parent, tokens));
  const auto found = std::find_if(begin, end, [&](const auto& entry) {
    return entry.second->parent == parent && std::ranges::equal(entry.second->tokens, tokens);
  });
  return found == end ? nullptr : found->second.get();
}

PrefixNode* PrefixTree::Use(PrefixNode* parent, std::span<const int32_t> tokens) {
  PrefixNode* node = Find(parent, tokens);
  if (node == nullptr) {
    auto added = std::make_unique<PrefixNode>();
    added->parent = parent;
    const uint64_t key = KeyOf(parent, tokens);
    added->key = key;
    added->tokens.assign(tokens.begin(), tokens.end());
    added->pages.assign(groups_, -1);
    node = nodes_.emplace(key, std::move(added))->second.get();
    if (parent != nullptr) ++parent->users;
  }
  ++node->users;
  return node;
}

void PrefixTree::Release(PrefixNode* node) {
  while (node != nullptr && --node->users == 0) {
    PrefixNode* const parent = node->parent;
    const auto [begin, end] = nodes_.equal_range(node->key);
    nodes_.erase(
        std::find_if(begin, end, [node](const auto& entry) { return entry.second.get() == node; }));
    node = parent;
  }
}

}  // namespace marlin
