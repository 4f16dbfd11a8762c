// Permutations along k: weights whose groups lie across k are stored with their rows sorted by
// group, so that the groups are consecutive, with the place of every row.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layout/weights_buffer.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

namespace marlin {

/// Checks that every row of i32 [experts, k] names every k once. Errors: kMalformedFile with the
/// position of the first number that is out of range or repeated.
Status CheckPermutation(const TensorView& permutation);

/// The k of all groups, group after group and ascending within one. Empty where no order of k makes
/// the groups of a WeightsSpec: group g has more or fewer k than a consecutive one would, or
/// group_size is no multiple of kGroupGranule.
/// Precondition: every group is in [0, ceil(k / group_size)).
std::vector<int32_t> SortByGroup(std::span<const int32_t> group_of, int64_t group_size);

/// order[result[i]] = i. Precondition: a permutation.
std::vector<int32_t> InverseOf(std::span<const int32_t> order);

/// Codes in the k-packed layout: words [WordsAlongK, n].
struct PackedRows {
  int bits = 4;  ///< At most 8.
  int64_t k = 0;
  int64_t n = 0;
};

/// Row i of `to` is row order[i] of `from`; codes past k are 0. Precondition: `order` has k
/// elements in [0, k).
void ReorderRows(const PackedRows& shape, const uint32_t* from, std::span<const int32_t> order,
                 uint32_t* to);

/// Permutes the codes of one matrix that were filled in the order of k, and stores the permutation.
/// Precondition: a spec of one expert with a permutation. Errors: kOutOfMemory.
Status StoreSorted(std::span<const int32_t> permutation, WeightsBuffer* buffer);

}  // namespace marlin
