#include "backends/metal/runtime/error_words.h"

#include <utility>

#include "base/macros.h"

namespace marlin::metal {
namespace {

/// Words per allocation.
constexpr int64_t kBlock = 64;

}  // namespace

Result<std::shared_ptr<ErrorWords::Word>> ErrorWords::Take() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    MARLIN_ASSIGN_OR_RETURN(DriverMemory<Word> block, AllocateMemory<Word>(driver_, kBlock));
    free_.reserve((blocks_.size() + 1) * kBlock);  // So that Return cannot fail.
    for (int64_t i = 0; i < kBlock; ++i) free_.push_back(block.get() + i);
    blocks_.push_back(std::move(block));
  }
  Word* const word = free_.back();
  free_.pop_back();
  return std::shared_ptr<Word>(
      word, [words = shared_from_this()](Word* returned) { words->Return(returned); });
}

void ErrorWords::Return(Word* word) {
  const std::lock_guard lock(mutex_);
  free_.push_back(word);
}

}  // namespace marlin::metal
