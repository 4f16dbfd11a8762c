// Two sequences of a model in one batch, and all their logits, to compare models bit by bit.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/model.h"
#include "random_model.h"

namespace marlin::testing {

struct TwoSequences {
  const Model& model;
  std::vector<int32_t> tokens;  ///< As many as the longer sequence takes.
  Sequence a;                   ///< Not truncatable.
  Sequence b;
  std::vector<float> logits;  ///< All calls', concatenated.

  TwoSequences(const Model& of, size_t most)
      : model(of),
        tokens(TokensBelow(static_cast<int32_t>(of.info().vocab_size), most)),
        a(*of.NewSequence({.truncatable = false})),
        b(*of.NewSequence()) {}

  /// The next tokens of both in one call; the logits of the last token of each, or of all of b's.
  void Forward(int64_t of_a, int64_t of_b, bool all_logits) {
    const auto next = [&](const Sequence& sequence, int64_t count) {
      return std::span(tokens).subspan(static_cast<size_t>(sequence.length()),
                                       static_cast<size_t>(count));
    };
    const SequenceInput inputs[] = {{&a, next(a, of_a)}, {&b, next(b, of_b), all_logits}};
    const int64_t rows = 1 + (all_logits ? of_b : 1);
    const int64_t vocab = model.info().vocab_size;
    std::vector<float> own(static_cast<size_t>(rows * vocab));
    const Status status = model.Forward(inputs, {own.data(), DType::kF32, {rows, vocab}});
    EXPECT_TRUE(status.ok()) << status.message();
    logits.insert(logits.end(), own.begin(), own.end());
  }
};

}  // namespace marlin::testing
