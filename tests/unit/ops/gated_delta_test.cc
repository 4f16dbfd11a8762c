// GatedDelta against its reference on every ISA level of this CPU.
#include "reference/gated_delta.h"

#include <fmt/format.h>

#include "recurrent_fixture.h"

namespace marlin::gated_delta_test {
namespace {

using recurrent_test::Call;
using recurrent_test::HeadsOfInput;

using GatedDeltaOnEveryLevel = OnEveryLevel;
MARLIN_ON_EVERY_LEVEL(GatedDeltaOnEveryLevel);

struct DeltaCase {
  GatedDeltaSizes sizes;  ///< Key heads, value heads, key_dim, value_dim, conv_width.
  bool packed;
  DType out = DType::kF32;
};

constexpr DeltaCase kCases[] = {
    {{2, 4, 16, 16, 4}, false},
    {{1, 1, 1, 1, 1}, false},
    {{1, 3, 20, 12, 2}, true},
    {{4, 4, 33, 7, 3}, true},
    {{2, 6, 7, 45, 4}, false},
    {{1, 2, 128, 128, 4}, true},
    {{3, 3, 24, 130, 16}, true, DType::kBf16},
};

std::string NameOf(const DeltaCase& c) {
  return fmt::format("{} and {} heads of {} and {}, width {}", c.sizes.key_heads,
                     c.sizes.value_heads, c.sizes.key_dim, c.sizes.value_dim, c.sizes.conv_width);
}

struct DeltaOp {
  using Case = DeltaCase;
  using Inputs = GatedDeltaInputs;
  using Weights = GatedDeltaWeights;

  static std::vector<HeadsOfInput> HeadsOf(const GatedDeltaSizes& s) {
    const int64_t heads = s.value_heads / s.key_heads;
    const int64_t values = heads * s.value_dim;
    return {{s.key_heads, s.key_dim}, {s.key_heads, s.key_dim}, {s.key_heads, values},
            {s.key_heads, values},    {s.key_heads, heads},     {s.key_heads, heads}};
  }
  static std::vector<Shape> ParametersOf(const GatedDeltaSizes& s) {
    return {{s.channels(), s.conv_width}, {s.value_heads}, {s.value_heads}, {s.value_dim}};
  }
  static Inputs InputsOf(const std::vector<MutableTensorView>& v) {
    return {v[0], v[1], v[2], v[3], v[4], v[5]};
  }
  static Weights WeightsOf(const std::vector<TensorView>& v, const Case& c) {
    return {v[0], v[1], v[2], v[3], 1e-5F, c.sizes};
  }
  static Shape OutShape(const GatedDeltaSizes& s, int64_t rows) {
    return {rows, s.value_heads, s.value_dim};
  }
  static std::pair<int64_t, int64_t> KeptElements(const GatedDeltaSizes& s) {
    return {(s.conv_width - 1) * s.channels(), s.conv_elements()};
  }
  static Status Run(const Device& device, const Inputs& inputs, const Weights& weights,
                    const RecurrentRows& rows, const RecurrentStates& states,
                    const MutableTensorView& out, Determinism determinism) {
    return GatedDelta(device, inputs, weights, rows, states, out, determinism);
  }
  static std::vector<double> Reference(const Inputs& inputs, const Weights& weights,
                                       std::span<const int64_t> rows, std::vector<double>* state) {
    return reference::GatedDelta(inputs, weights, weights.sizes, rows, state);
  }
};

TEST_P(GatedDeltaOnEveryLevel, IsItsReferenceInStepsOfSeveralSequences) {
  for (const DeltaCase& c : kCases) {
    SCOPED_TRACE(NameOf(c));
    recurrent_test::ExpectIsItsReference<DeltaOp>(device(), c);
  }
}

TEST_P(GatedDeltaOnEveryLevel, HasTheSameBitsHoweverASequenceIsDivided) {
  for (const DeltaCase& c : recurrent_test::CasesOn<DeltaCase>(device(), kCases)) {
    SCOPED_TRACE(NameOf(c));
    recurrent_test::ExpectSameBitsHoweverDivided<DeltaOp>(device(), c);
  }
}

TEST_P(GatedDeltaOnEveryLevel, RowsThatTakeNoPartChangeNothing) {
  recurrent_test::ExpectOthersChangeNothing<DeltaOp>(device(), kCases[2]);
}

class GatedDeltaCalls : public recurrent_test::RecurrentCalls<DeltaOp> {
 protected:
  GatedDeltaCalls() : RecurrentCalls(kCases[0]) {}
};

TEST_F(GatedDeltaCalls, WrongShapesAreRefused) {
  using Changed = Call<DeltaOp>;
  ExpectRefused("sizes: 5 value heads are not a multiple of 2",
                [](Changed& call) { call.weights.sizes.value_heads = 5; });
  ExpectRefused("conv_width: expected 1..16, got 17",
                [](Changed& call) { call.weights.sizes.conv_width = 17; });
  ExpectRefused("out: expected", [](Changed& call) { call.weights.sizes.value_dim = 15; });
  ExpectRefused("queries: expected",
                [](Changed& call) { call.inputs.queries = call.inputs.values; });
  ExpectRefused("decays: expected", [](Changed& call) { call.inputs.decays = call.inputs.gates; });
  ExpectRefused("conv: expected", [](Changed& call) { call.weights.sizes.conv_width = 3; });
  ExpectRefused("log_decay: ", [](Changed& call) { call.weights.log_decay = call.weights.norm; });
  ExpectRefused("norm: ", [](Changed& call) { call.weights.norm = TensorView(); });
  ExpectRefused("epsilon: ", [](Changed& call) { call.weights.epsilon = -1; });
}

TEST_F(GatedDeltaCalls, WrongRowsAndStatesAreRefused) { ExpectWrongRowsAndStatesAreRefused(); }

}  // namespace
}  // namespace marlin::gated_delta_test
