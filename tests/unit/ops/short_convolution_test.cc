// ShortConvolution against its reference on every ISA level of this CPU.
#include "reference/short_convolution.h"

#include <fmt/format.h>

#include "recurrent_fixture.h"

namespace marlin::short_convolution_test {
namespace {

using recurrent_test::Call;
using recurrent_test::HeadsOfInput;

using ShortConvolutionOnEveryLevel = OnEveryLevel;
MARLIN_ON_EVERY_LEVEL(ShortConvolutionOnEveryLevel);

struct ConvolutionCase {
  ShortConvolutionSizes sizes;  ///< Channels, conv_width.
  bool packed;
  bool bias = false;
  DType out = DType::kF32;
};

constexpr ConvolutionCase kCases[] = {
    {{64, 3}, true},
    {{1, 2}, false, true},
    {{300, 4}, true, true, DType::kBf16},
    {{513, 16}, false},
};

std::string NameOf(const ConvolutionCase& c) {
  return fmt::format("{} channels, width {}", c.sizes.channels, c.sizes.conv_width);
}

TensorView Flat(const MutableTensorView& x) {
  return TensorView(x.data(), x.dtype(), {x.dim(0), x.dim(2)}, {x.stride(0), 1});
}

struct ConvolutionOp {
  using Case = ConvolutionCase;
  using Inputs = ShortConvolutionInputs;
  using Weights = ShortConvolutionWeights;

  static std::vector<HeadsOfInput> HeadsOf(const ShortConvolutionSizes& s) {
    return {{1, s.channels}, {1, s.channels}, {1, s.channels}};
  }
  static std::vector<Shape> ParametersOf(const ShortConvolutionSizes& s) {
    return {{s.channels, s.conv_width}, {s.channels}};
  }
  static Inputs InputsOf(const std::vector<MutableTensorView>& v) {
    return {Flat(v[0]), Flat(v[1]), Flat(v[2])};
  }
  static Weights WeightsOf(const std::vector<TensorView>& v, const Case& c) {
    return {v[0], c.bias ? v[1] : TensorView(), c.sizes};
  }
  static Shape OutShape(const ShortConvolutionSizes& s, int64_t rows) { return {rows, s.channels}; }
  static std::pair<int64_t, int64_t> KeptElements(const ShortConvolutionSizes& s) {
    return {(s.conv_width - 1) * s.channels, s.state_elements()};
  }
  static Status Run(const Device& device, const Inputs& inputs, const Weights& weights,
                    const RecurrentRows& rows, const RecurrentStates& states,
                    const MutableTensorView& out, Determinism /*determinism*/) {
    return ShortConvolution(device, inputs, weights, rows, states, out);
  }
  static std::vector<double> Reference(const Inputs& inputs, const Weights& weights,
                                       std::span<const int64_t> rows, std::vector<double>* state) {
    return reference::ShortConvolution(inputs, weights, rows, state);
  }
};

TEST_P(ShortConvolutionOnEveryLevel, IsItsReferenceInStepsOfSeveralSequences) {
  for (const ConvolutionCase& c : kCases) {
    SCOPED_TRACE(NameOf(c));
    recurrent_test::ExpectIsItsReference<ConvolutionOp>(device(), c);
  }
}

TEST_P(ShortConvolutionOnEveryLevel, LongSequencesAreTheirReference) {
  for (const ConvolutionCase& c : recurrent_test::CasesOn<ConvolutionCase>(device(), kCases)) {
    SCOPED_TRACE(NameOf(c));
    const double most = Unit(c.out) + 1e-5;
    recurrent_test::ExpectLongSequencesAreTheReference<ConvolutionOp>(device(), c, most);
  }
}

TEST_P(ShortConvolutionOnEveryLevel, HasTheSameBitsHoweverASequenceIsDivided) {
  for (const ConvolutionCase& c : recurrent_test::CasesOn<ConvolutionCase>(device(), kCases)) {
    SCOPED_TRACE(NameOf(c));
    recurrent_test::ExpectSameBitsHoweverDivided<ConvolutionOp>(device(), c);
  }
}

TEST_P(ShortConvolutionOnEveryLevel, RowsThatTakeNoPartChangeNothing) {
  recurrent_test::ExpectOthersChangeNothing<ConvolutionOp>(device(), kCases[2]);
}

class ShortConvolutionCalls : public recurrent_test::RecurrentCalls<ConvolutionOp> {
 protected:
  ShortConvolutionCalls() : RecurrentCalls(kCases[0]) {}
};

TEST_F(ShortConvolutionCalls, WrongShapesAreRefused) {
  using Changed = Call<ConvolutionOp>;
  ExpectRefused("conv_width: expected 2..16, got 1",
                [](Changed& call) { call.weights.sizes.conv_width = 1; });
  ExpectRefused("sizes: 0 channels", [](Changed& call) { call.weights.sizes.channels = 0; });
  ExpectRefused("out: expected", [](Changed& call) { call.weights.sizes.channels = 65; });
  ExpectRefused("in_gates: expected",
                [](Changed& call) { call.inputs.in_gates = call.weights.conv; });
  ExpectRefused("conv: expected", [](Changed& call) { call.weights.sizes.conv_width = 4; });
  ExpectRefused("conv_bias: ", [](Changed& call) { call.weights.conv_bias = call.weights.conv; });
}

TEST_F(ShortConvolutionCalls, WrongRowsAndStatesAreRefused) {
  ExpectWrongRowsAndStatesAreRefused();
}

}  // namespace
}  // namespace marlin::short_convolution_test
