// Mamba2 against its reference on every ISA level of this CPU.
#include "reference/mamba2.h"

#include <fmt/format.h>

#include "recurrent_fixture.h"

namespace marlin::mamba2_test {
namespace {

using recurrent_test::Call;
using recurrent_test::HeadsOfInput;

using Mamba2OnEveryLevel = OnEveryLevel;
MARLIN_ON_EVERY_LEVEL(Mamba2OnEveryLevel);

enum class Norm { kAfterGate, kBeforeGate, kNone };

struct Mamba2Case {
  Mamba2Sizes sizes;  ///< Heads, groups, head_dim, state_size, conv_width.
  bool packed;
  Norm norm = Norm::kAfterGate;
  bool bias = true;
  DType out = DType::kF32;
  float min_step = 0.0F;
  float max_step = std::numeric_limits<float>::infinity();
};

constexpr Mamba2Case kCases[] = {
    {{4, 1, 16, 16, 4}, true},
    {{1, 1, 1, 1, 1}, false, Norm::kNone},
    {{6, 2, 12, 20, 2}, true, Norm::kBeforeGate, false},
    {{4, 4, 7, 33, 3}, true, Norm::kAfterGate, true, DType::kBf16, 0.5F, 1.5F},
    {{6, 3, 45, 7, 4}, false, Norm::kNone, false, DType::kBf16},
    {{3, 1, 64, 128, 4}, true, Norm::kBeforeGate, true, DType::kBf16},
    {{2, 1, 130, 24, 16}, false, Norm::kAfterGate, false, DType::kF32, 0.1F},
};

std::string NameOf(const Mamba2Case& c) {
  return fmt::format("{} heads in {} groups of {} and {}, width {}", c.sizes.heads, c.sizes.groups,
                     c.sizes.head_dim, c.sizes.state_size, c.sizes.conv_width);
}

struct Mamba2Op {
  using Case = Mamba2Case;
  using Inputs = Mamba2Inputs;
  using Weights = Mamba2Weights;

  static std::vector<HeadsOfInput> HeadsOf(const Mamba2Sizes& s) {
    return {{s.heads, s.head_dim},
            {s.heads, s.head_dim},
            {s.groups, s.state_size},
            {s.groups, s.state_size},
            {1, s.heads}};
  }
  static std::vector<Shape> ParametersOf(const Mamba2Sizes& s) {
    return {{s.channels(), s.conv_width},
            {s.channels()},
            {s.heads},
            {s.heads},
            {s.heads},
            {s.features()}};
  }
  static Inputs InputsOf(const std::vector<MutableTensorView>& v) {
    const TensorView steps(v[4].data(), DType::kF32, {v[4].dim(0), v[4].dim(2)},
                           {v[4].stride(0), 1});
    return {v[0], v[1], v[2], v[3], steps};
  }
  static Weights WeightsOf(const std::vector<TensorView>& v, const Case& c) {
    return {v[0],
            c.bias ? v[1] : TensorView(),
            v[2],
            v[3],
            v[4],
            c.norm == Norm::kNone ? TensorView() : v[5],
            c.norm == Norm::kBeforeGate,
            1e-5F,
            c.min_step,
            c.max_step,
            c.sizes};
  }
  static Shape OutShape(const Mamba2Sizes& s, int64_t rows) { return {rows, s.heads, s.head_dim}; }
  static std::pair<int64_t, int64_t> KeptElements(const Mamba2Sizes& s) {
    return {(s.conv_width - 1) * s.channels(), s.conv_elements()};
  }
  static Status Run(const Device& device, const Inputs& inputs, const Weights& weights,
                    const RecurrentRows& rows, const RecurrentStates& states,
                    const MutableTensorView& out, Determinism determinism) {
    return Mamba2(device, inputs, weights, rows, states, out, determinism);
  }
  static std::vector<double> Reference(const Inputs& inputs, const Weights& weights,
                                       std::span<const int64_t> rows, std::vector<double>* state) {
    return reference::Mamba2(inputs, weights, rows, state);
  }
};

TEST_P(Mamba2OnEveryLevel, IsItsReferenceInStepsOfSeveralSequences) {
  for (const Mamba2Case& c : kCases) {
    SCOPED_TRACE(NameOf(c));
    recurrent_test::ExpectIsItsReference<Mamba2Op>(device(), c);
  }
}

// Sizes that a GPU runs in chunks on matrix units, whose operands have 11 significant bits, and one
// that it runs row by row.
TEST_P(Mamba2OnEveryLevel, LongSequencesAreTheirReference) {
  constexpr Mamba2Case kLong[] = {
      {{3, 1, 64, 128, 4}, true},
      {{10, 2, 32, 64, 4}, true, Norm::kBeforeGate},
      {{2, 2, 96, 128, 3}, false, Norm::kNone, false},
      {{2, 1, 64, 256, 4}, true},
      {{1, 1, 128, 72, 4}, false},
  };
  const double most = device().info().backend == "cuda" ? 2e-3 : 1e-5;
  for (const Mamba2Case& c : recurrent_test::CasesOn<Mamba2Case>(device(), kLong)) {
    SCOPED_TRACE(NameOf(c));
    recurrent_test::ExpectLongSequencesAreTheReference<Mamba2Op>(device(), c, most);
  }
}

TEST_P(Mamba2OnEveryLevel, HasTheSameBitsHoweverASequenceIsDivided) {
  for (const Mamba2Case& c : recurrent_test::CasesOn<Mamba2Case>(device(), kCases)) {
    SCOPED_TRACE(NameOf(c));
    recurrent_test::ExpectSameBitsHoweverDivided<Mamba2Op>(device(), c);
  }
}

TEST_P(Mamba2OnEveryLevel, RowsThatTakeNoPartChangeNothing) {
  for (const size_t c : {2, 3}) {
    recurrent_test::ExpectOthersChangeNothing<Mamba2Op>(device(), kCases[c]);
  }
}

class Mamba2Calls : public recurrent_test::RecurrentCalls<Mamba2Op> {
 protected:
  Mamba2Calls() : RecurrentCalls(kCases[0]) {}
};

TEST_F(Mamba2Calls, WrongShapesAreRefused) {
  using Changed = Call<Mamba2Op>;
  ExpectRefused("sizes: 4 heads are not a multiple of 3 groups",
                [](Changed& call) { call.weights.sizes.groups = 3; });
  ExpectRefused("conv_width: expected 1..16, got 17",
                [](Changed& call) { call.weights.sizes.conv_width = 17; });
  ExpectRefused("out: expected", [](Changed& call) { call.weights.sizes.head_dim = 15; });
  ExpectRefused("sizes: a state is too large",
                [](Changed& call) { call.weights.sizes.state_size = int64_t{1} << 61; });
  ExpectRefused("keys: expected", [](Changed& call) { call.inputs.keys = call.inputs.values; });
  ExpectRefused("steps: expected", [](Changed& call) { call.inputs.steps = call.inputs.gates; });
  ExpectRefused("conv: expected", [](Changed& call) { call.weights.sizes.conv_width = 3; });
  ExpectRefused("conv_bias: ", [](Changed& call) { call.weights.conv_bias = call.weights.norm; });
  ExpectRefused("log_decay: ", [](Changed& call) { call.weights.log_decay = call.weights.norm; });
  ExpectRefused("skip: ", [](Changed& call) { call.weights.skip = TensorView(); });
  ExpectRefused("norm: ", [](Changed& call) { call.weights.norm = call.weights.skip; });
  ExpectRefused("epsilon: ", [](Changed& call) { call.weights.epsilon = -1; });
  ExpectRefused("min_step, max_step: expected 0 <= 2 <= 1", [](Changed& call) {
    call.weights.min_step = 2;
    call.weights.max_step = 1;
  });
  ExpectRefused("min_step, max_step: ", [](Changed& call) { call.weights.max_step = NAN; });
}

TEST_F(Mamba2Calls, WrongRowsAndStatesAreRefused) { ExpectWrongRowsAndStatesAreRefused(); }

}  // namespace
}  // namespace marlin::mamba2_test
