// Memory in which kernels report wrong operands of runs in flight.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "backends/metal/runtime/driver.h"

namespace marlin::metal {

/// Thread-safe. The driver outlives it.
class ErrorWords : public std::enable_shared_from_this<ErrorWords> {
 public:
  /// As kernels/sort_experts.h writes it. A router has the least of its keys as its first word
  /// (kernels/router_parameters.h); kernels on rows have four (kernels/rows_elements.h). Kernels of
  /// samplers and recurrent mixers have adjacent ones, as int4.
  struct Word {
    int32_t selection;
    int32_t id;
    int32_t more[2] = {};
    bool operator==(const Word&) const = default;
  };

  static_assert(sizeof(Word) == 16);

  explicit ErrorWords(Driver& driver) : driver_(driver) {}

  /// The first of `count` adjacent, uninitialised words, which go back when its last reference
  /// does. Errors: kOutOfMemory.
  Result<std::shared_ptr<Word>> Take(int64_t count = 1);

 private:
  void Return(Word* first, int64_t count);

  Driver& driver_;
  std::mutex mutex_;
  std::vector<DriverMemory<Word>> blocks_;
  std::map<int64_t, std::vector<Word*>> free_;  ///< By the number of adjacent words.
};

}  // namespace marlin::metal
