// The KV cache of sequences, in pages of device memory.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/cache/page_pool.h"
#include "marlin/model.h"
#include "marlin/status.h"
#include "model/decoder_config.h"

namespace marlin {

/// The element type of a model's KV cache. Errors: kInvalidArgument for a type that is none of
/// ParseKvCacheType's.
Result<DType> CacheType(const ModelOptions& options);
/// Bytes of a token's keys and values in all layers from `first` on.
int64_t CacheTokenBytes(const DecoderConfig& config, DType type, int64_t first = 0);
/// Bytes of a sequence's recurrent states in these layers, whatever the cache's type; 0: no layer
/// has one. A sequence that is fed takes twice as much, and once more for each guess.
int64_t StateBytes(const DecoderConfig& config, int64_t first = 0);
/// The tokens of one sequence for which experts and layers leave room in a device's memory.
inline constexpr int64_t kReservedTokens = 8192;
/// Bytes of the cache of a sequence of that many tokens, or of the context, in these layers.
int64_t ReservedCacheBytes(const DecoderConfig& config, DType type, int64_t first = 0);

/// The pages of one sequence.
///
/// Prefix reuse: a sequence begins with Adopt, which gives it the pages of the tokens that others
/// have published under the same salt, and Publish shares its own with those that follow. Both only
/// change what is fed and which pages hold it. With ModelOptions::batch_invariant every later token
/// has the same bits as without; otherwise it may be rounded differently, since another part of the
/// text is fed, in other passes.
class KvCache {
 public:
  /// With `truncatable`, all positions keep their pages; otherwise positions that every window has
  /// passed lose theirs.
  KvCache(std::shared_ptr<PagePool> pool, bool truncatable);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  int64_t length() const { return length_; }
  /// Advances the length after [length(), length) were fed, to the states that were computed;
  /// Grow(length()) gives these up.
  void Grow(int64_t length);
  /// The shortest length other than 0 that Truncate accepts.
  int64_t ShortestLength() const;
  /// The tokens in published pages, a multiple of the page size.
  int64_t PublishedLength() const;
  /// Whether a length is inside a published page, whose tokens others may read.
  bool DividesPublished(int64_t length) const;
  /// Keeps the recurrent states after length() tokens, instead of those kept before, until Truncate
  /// drops some of these tokens.
  void KeepStates();
  /// False: the recurrent states after `length` tokens are not kept, and nothing changes. Those
  /// after 0 and length() tokens always are. Precondition: length is 0, or in [ShortestLength(),
  /// length()] and not DividesPublished.
  bool Truncate(int64_t length);

  /// Takes published pages that hold the tokens from length() on, and returns how many that are: a
  /// multiple of the page size, by which the sequence grows. `tokens` is the whole text, of which
  /// the first length() tokens are fed; the last one always remains to be fed. The first call, on
  /// an empty sequence, determines the salt, which separates those who must not learn from the time
  /// of an answer what others asked. A later one continues where others have published more in the
  /// meantime; it returns 0 unless the sequence consists of published pages. The sequence can be
  /// truncated as one that has dropped the pages before its windows.
  int64_t Adopt(std::span<const int32_t> tokens, std::string_view salt);
  /// Publishes the pages that are full, and `with_states` the recurrent states if length() is a
  /// multiple of the page size. `tokens` is the text of the sequence, at least of its published
  /// pages; the ones after length() are ignored. Every token must be final: not a draft. Does
  /// nothing without Adopt. Call it after a pass, and before Reserve takes the next pages, which
  /// drops those before a window.
  void Publish(std::span<const int32_t> tokens, bool with_states = true);

  /// Allocates pages for the positions [position, end), at or after length(), and for the states
  /// after them. Where the last `drafts` of these are guesses, which follow one token, each has
  /// states of its own, to which Grow may advance; kNoDrafts: there are none, and the pages of
  /// earlier ones stay for later ones. Earlier positions and states stay intact until Grow, so that
  /// a failed call can be retried. Errors: kOutOfMemory.
  Status Reserve(int64_t position, int64_t end, int64_t drafts = kNoDrafts);
  static constexpr int64_t kNoDrafts = -1;
  /// Returns the pages of guesses, which no call may use; false: there are none.
  bool DropGuesses();
  /// Returns the pages of positions from `end` on, at or after length(), and at length() the pages
  /// of states after them. No work may use them.
  void Release(int64_t end);

  /// The page of each block of a group that is not recurrent, or -1: the sequence's block table.
  const std::vector<int32_t>& Blocks(size_t group) const { return blocks_[group]; }
  /// A sequence's row of StepPages::block_tables, for a pass that begins at `position`. In a
  /// recurrent group a pass after the first one of a call goes on from its state.
  std::span<const int32_t> TableFrom(size_t group, int64_t position) const;
  /// The states of a recurrent group before and after one of the rows that Reserve has taken drafts
  /// for: row 0 is the token, row 1 the first guess.
  std::array<int32_t, 2> TableOfRow(size_t group, int64_t row) const;

 private:
  void DropUnseen(size_t group, int64_t position);
  /// Returns the pages from a block on.
  void ReturnFrom(size_t block);
  /// Where the page is that gets the state after a row, as in TableOfRow.
  static size_t PlaceAfter(int64_t row) {
    return row == 0 ? size_t{kNextState} : kStatePages + static_cast<size_t>(row) - 1;
  }
  /// Takes or returns pages, so that as many guesses have states.
  Status ResizeGuesses(size_t group, int64_t drafts);
  /// Sets kNextState without an owner more.
  void SetNextState(size_t group, int32_t page);
  /// Replaces a page of a recurrent group, of which the sequence becomes another owner; -1: none.
  void SetState(size_t group, StatePage which, int32_t page);
  /// Whether the states after `length` tokens are there; then the sequence has them.
  bool RestoreStates(int64_t length);

  std::shared_ptr<PagePool> pool_;
  bool truncatable_;
  int64_t length_ = 0;
  int64_t kept_length_ = 0;  ///< The length of KeepStates; 0: none.
  int64_t drafts_ = 0;       ///< Guesses of the last Reserve.
  BlockTables blocks_;
  PrefixPlace place_;
};

struct Sequence::State {
  State(std::weak_ptr<const Model::Impl> owner, std::shared_ptr<PagePool> pool, bool truncatable)
      : model(std::move(owner)), cache(std::move(pool), truncatable) {}

  /// Whether this model made the sequence. The weak pointer keeps the control block alive, so that
  /// a new model cannot be mistaken for a destroyed one.
  bool BelongsTo(const std::shared_ptr<const Model::Impl>& other) const {
    return !model.owner_before(other) && !other.owner_before(model);
  }

  std::weak_ptr<const Model::Impl> model;
  KvCache cache;
  std::atomic_flag in_use;  ///< Set while a call reads or changes the cache.
};

/// Claims sequences for one call, so that a concurrent call on the same sequence is rejected
/// instead of corrupting its cache.
class SequenceClaim {
 public:
  SequenceClaim() = default;
  SequenceClaim(const SequenceClaim&) = delete;
  SequenceClaim& operator=(const SequenceClaim&) = delete;
  ~SequenceClaim() {
    for (Sequence::State* state : taken_) state->in_use.clear(std::memory_order_release);
  }
  /// False if another call has claimed it.
  bool Take(Sequence::State& state) {
    taken_.reserve(taken_.size() + 1);
    if (state.in_use.test_and_set(std::memory_order_acquire)) return false;
    taken_.push_back(&state);
    return true;
  }

 private:
  std::vector<Sequence::State*> taken_;
};

}  // namespace marlin
