#include "backends/metal/runtime/error_words.h"

#include <utility>

#include "base/checked.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

/// Words per allocation.
constexpr int64_t kBlock = 64;

}  // namespace

Result<std::shared_ptr<ErrorWords::Word>> ErrorWords::Take(int64_t count) {
  if (count > 1) count = RoundUp(count, kBlock);
  const std::lock_guard lock(mutex_);
  std::vector<Word*>& free = free_[count];
  if (free.empty()) {
    const int64_t words = RoundUp(count, kBlock);
    MARLIN_ASSIGN_OR_RETURN(DriverMemory<Word> block, AllocateMemory<Word>(driver_, words));
    free.reserve((blocks_.size() + 1) * kBlock);  // So that Return cannot fail.
    for (int64_t i = 0; i < words; i += count) free.push_back(block.get() + i);
    blocks_.push_back(std::move(block));
  }
  Word* const first = free.back();
  free.pop_back();
  return std::shared_ptr<Word>(first, [words = shared_from_this(), count](Word* returned) {
    words->Return(returned, count);
  });
}

void ErrorWords::Return(Word* first, int64_t count) {
  const std::lock_guard lock(mutex_);
  free_.find(count)->second.push_back(first);
}

}  // namespace marlin::metal
