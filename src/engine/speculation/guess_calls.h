// The calls in which a draft guesses the next tokens of several texts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/speculation/draft_samplers.h"
#include "engine/speculation/drafter.h"
#include "marlin/model.h"
#include "marlin/status.h"

namespace marlin {

class GuessCalls {
 public:
  /// `hidden_size`: of a draft whose hidden states its next guesses need; 0: they need none. The
  /// draft and the samplers outlive the calls.
  GuessCalls(const Model& draft, DraftSamplers* samplers, int64_t hidden_size)
      : draft_(draft), samplers_(*samplers), hidden_size_(hidden_size) {}

  /// Adds a text, with the tokens that its sequence of the draft is fed first: at least one.
  void Add(GuessRequest* request, const SequenceInput& input);
  /// Feeds all texts and samples the first guess of each; then, also after an error, the texts
  /// whose sequences have grown have one. Texts without room for their sampler's state have none.
  /// Errors: as Model::ForwardAndSample; with kNonFiniteInput others have guesses.
  Status SampleFirst();
  /// Decodes the other guesses of those that have the first one. The sequences have grown by all
  /// guesses but the last. Errors: likewise.
  Status DecodeOthers();

 private:
  struct Text {
    GuessRequest* request;
    SequenceInput input;
    int64_t most;               ///< Guesses.
    std::vector<float> hidden;  ///< After the tokens of `input`; the last row after those decoded.
  };
  /// `steps` more guesses of each of `count` texts from `first` on.
  Status Decode(size_t first, size_t count, int64_t steps);

  const Model& draft_;
  DraftSamplers& samplers_;
  int64_t hidden_size_;
  MutableTensorView states_;
  std::vector<Text> texts_;  ///< Those with the most guesses first.
};

}  // namespace marlin
