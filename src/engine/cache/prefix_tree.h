// The tree of the prefixes whose pages sequences share: a node is a page of tokens that follow its
// parent's, so that the path from a root to a node is a prefix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace marlin {

struct PrefixNode {
  PrefixNode* parent = nullptr;  ///< Null for a root.
  uint64_t key = 0;              ///< Hash of the parent's key and the tokens.
  std::vector<int32_t> tokens;   ///< As many as a page has; a root's are the bytes of its salt.
  /// The page of each KV cache group, or -1. A recurrent group, whose states exist after certain
  /// tokens only, has a page in the nodes that end with such a token.
  std::vector<int32_t> pages;
  int64_t users = 0;  ///< Its pages, its children and the sequences that are at it.
};

/// Nodes live until nobody uses them. Not thread-safe: the pool's mutex guards it.
class PrefixTree {
 public:
  using Hash = uint64_t (*)(uint64_t parent, std::span<const int32_t> tokens);
  static uint64_t HashOf(uint64_t parent, std::span<const int32_t> tokens);

  /// The keys start from a random number, so that nobody can prepare prompts whose hashes collide.
  PrefixTree(size_t groups, Hash hash);

  /// The root of the prefixes with this salt, with one user more.
  PrefixNode* UseRoot(std::string_view salt);
  /// The child with these tokens, which are compared: an equal hash is not enough. Null: none.
  PrefixNode* Find(PrefixNode* parent, std::span<const int32_t> tokens) const;
  /// The child with these tokens, which is added if there is none, with one user more.
  PrefixNode* Use(PrefixNode* parent, std::span<const int32_t> tokens);
  /// Takes one user from a node, and deletes it if that was the last one.
  void Release(PrefixNode* node);

  size_t size() const { return nodes_.size(); }

 private:
  uint64_t KeyOf(const PrefixNode* parent, std::span<const int32_t> tokens) const;

  size_t groups_;
  Hash hash_;
  uint64_t seed_;
  std::unordered_multimap<uint64_t, std::unique_ptr<PrefixNode>> nodes_;  ///< By their keys.
};

}  // namespace marlin
