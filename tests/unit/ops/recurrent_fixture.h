// Tests that all operations of recurrent.h share: steps of several sequences against the reference,
// states in place and in other pages, and the same bits however sequences are divided.
//
// An operation is a class of static functions and types:
//   Case { sizes; packed; out; }, Inputs, Weights
//   HeadsOf(sizes)       heads and width of each input
//   ParametersOf(sizes)  the shape of each parameter
//   InputsOf(views), WeightsOf(views, case), OutShape(sizes, rows), KeptElements(sizes)
//   Run(...), Reference(...)
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "decoder_fixture.h"
#include "marlin/recurrent.h"

namespace marlin::recurrent_test {

/// A token of a sequence: the same numbers in every call. Position -1: it takes no part.
struct Token {
  int64_t sequence;
  int64_t index;
  bool takes_part = true;
};

inline std::vector<Token> Tokens(int64_t sequence, int64_t first, int64_t count) {
  std::vector<Token> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back({sequence, first + i});
  return tokens;
}

inline std::vector<Token> Join(const std::vector<std::vector<Token>>& parts) {
  std::vector<Token> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

struct HeadsOfInput {
  int64_t heads;
  int64_t width;
};

/// The arguments of a call for some tokens, each sequence's in its order.
template <class Op>
class Step {
 public:
  Step(const typename Op::Case& c, const std::vector<Token>& tokens)
      : rows_(static_cast<int64_t>(tokens.size())), out_(c.out, Op::OutShape(c.sizes, rows_), 3) {
    c.packed ? AddPacked(Op::HeadsOf(c.sizes)) : AddApart(Op::HeadsOf(c.sizes));
    for (int64_t row = 0; row < rows_; ++row) Fill(tokens[static_cast<size_t>(row)], row);
    int64_t sequence = -1;
    for (const Token& token : tokens) {
      if (token.sequence != sequence) Begin(sequence = token.sequence);
      positions_.push_back(token.takes_part ? static_cast<int32_t>(token.index) : -1);
    }
    first_rows_.push_back(static_cast<int32_t>(rows_));
  }

  typename Op::Inputs inputs() const { return Op::InputsOf(views_); }
  /// A sequence's row range is the one of its place in the call.
  const std::vector<int64_t>& sequences() const { return sequences_; }
  int64_t FirstRow(size_t place) const { return first_rows_[place]; }
  RecurrentRows Rows(const std::vector<int32_t>& pages) const {
    const auto sequences = static_cast<int64_t>(sequences_.size());
    return {{positions_.data(), DType::kI32, {rows_}},
            {first_rows_.data(), DType::kI32, {sequences + 1}},
            {pages.data(), DType::kI32, {sequences, 2}}};
  }
  MutableTensorView out() { return out_.view(); }
  int64_t rows() const { return rows_; }
  std::vector<int64_t> Taking(size_t place) const {
    std::vector<int64_t> rows;
    for (int64_t row = FirstRow(place); row < FirstRow(place + 1); ++row) {
      if (positions_[static_cast<size_t>(row)] >= 0) rows.push_back(row);
    }
    return rows;
  }
  std::vector<double> OutOf(int64_t row) {
    const std::vector<double> all = reference::Elements(out_.view());
    const auto count = static_cast<int64_t>(all.size()) / rows_;
    return {all.begin() + row * count, all.begin() + (row + 1) * count};
  }

 private:
  void AddApart(const std::vector<HeadsOfInput>& inputs) {
    for (const auto& [heads, width] : inputs) {
      views_.push_back(tensors_.emplace_back(DType::kF32, Shape{rows_, heads, width}, 5).view());
    }
  }

  /// All inputs in one tensor: side by side per head if they have the same heads, otherwise one
  /// after another.
  void AddPacked(const std::vector<HeadsOfInput>& inputs) {
    int64_t columns = 0;
    int64_t of_head = 0;
    for (const auto& [heads, width] : inputs) {
      columns += heads * width;
      of_head += width;
    }
    const bool by_head = std::ranges::all_of(
        inputs, [&](const HeadsOfInput& input) { return input.heads == inputs[0].heads; });
    const MutableTensorView all = tensors_.emplace_back(DType::kF32, Shape{rows_, columns}).view();
    int64_t first = 0;
    for (const auto& [heads, width] : inputs) {
      MutableTensorView part(all.As<float>() + first, DType::kF32, {rows_, heads, width});
      part.set_stride(0, all.stride(0));
      part.set_stride(1, by_head ? of_head : width);
      views_.push_back(part);
      first += by_head ? width : heads * width;
    }
  }

  void Begin(int64_t sequence) {
    sequences_.push_back(sequence);
    first_rows_.push_back(static_cast<int32_t>(positions_.size()));
  }

  void Fill(const Token& token, int64_t row) {
    std::mt19937 random(static_cast<unsigned>(1000 * token.sequence + token.index + 1));
    std::normal_distribution<float> normal(0.0F, 1.5F);
    for (const MutableTensorView& view : views_) {
      for (int64_t head = 0; head < view.dim(1); ++head) {
        float* const at = view.As<float>() + row * view.stride(0) + head * view.stride(1);
        for (int64_t i = 0; i < view.dim(2); ++i) at[i] = normal(random);
      }
    }
  }

  int64_t rows_;
  std::vector<Tensor> tensors_;
  std::vector<MutableTensorView> views_;
  std::vector<int32_t> positions_, first_rows_;
  std::vector<int64_t> sequences_;
  Tensor out_;
};

/// A layer's parameters, and states in three slabs, of which one is not allocated.
template <class Op>
class Net {
 public:
  static constexpr int64_t kSlabPages = 3;

  explicit Net(const typename Op::Case& c)
      : case_(c), stride_((c.sizes.state_elements() + 127) / 32 * 32) {
    unsigned seed = 0;
    for (const Shape& shape : Op::ParametersOf(c.sizes)) {
      parameters_.emplace_back(DType::kF32, shape).Fill(seed + 1, seed == 0 ? 0.6 : 1.0);
      ++seed;
    }
    for (auto& slab : memory_) slab.assign(static_cast<size_t>(kSlabPages * stride_), NAN);
    for (size_t i = 0; i < std::size(memory_); ++i)
      slabs_[i] = i == 1 ? nullptr : memory_[i].data();
  }

  typename Op::Weights weights() {
    std::vector<TensorView> views;
    for (Tensor& parameter : parameters_) views.push_back(parameter.view());
    return Op::WeightsOf(views, case_);
  }
  RecurrentStates states() const { return {slabs_, kSlabPages, stride_, 64}; }
  Status Run(const Device& device, Step<Op>* step, const std::vector<int32_t>& pages,
             Determinism determinism = Determinism::kDefault) {
    const Status status = Op::Run(device, step->inputs(), weights(), step->Rows(pages), states(),
                                  step->out(), determinism);
    return status.ok() ? device.Synchronize() : status;
  }
  std::vector<float> State(int32_t page) const {
    const auto first = static_cast<size_t>(page % kSlabPages * stride_ + 64);
    const std::vector<float>& slab = memory_[static_cast<size_t>(page / kSlabPages)];
    const auto begin = slab.begin() + static_cast<std::ptrdiff_t>(first);
    std::vector<float> state(begin, begin + case_.sizes.state_elements());
    // The elements that round the kept inputs up belong to nothing.
    const auto [kept, end] = Op::KeptElements(case_.sizes);
    std::fill(state.begin() + kept, state.begin() + end, 0.0F);
    return state;
  }

 private:
  const typename Op::Case& case_;
  std::vector<Tensor> parameters_;
  int64_t stride_;
  std::vector<float> memory_[3];
  void* slabs_[3] = {};
};

inline void ExpectStateNear(const std::vector<float>& got, const std::vector<double>& want,
                            const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(got[i]), want[i], 2e-5 * (1 + std::abs(want[i])))
        << what << ": state at " << i;
  }
}

/// Several sequences of different lengths in three calls, in place and in other pages.
template <class Op>
void ExpectIsItsReference(const Device& device, const typename Op::Case& c) {
  Net<Op> net(c);
  // Sequence s keeps its state in page 8 - s from its second call on.
  const std::vector<std::pair<std::vector<Token>, std::vector<int32_t>>> calls = {
      {Join({Tokens(0, 0, 5), Tokens(1, 0, 1), Tokens(2, 0, 38)}), {-1, 0, -1, 1, -1, 2}},
      {Join({Tokens(2, 38, 1), Tokens(0, 5, 1), Tokens(1, 1, 2)}), {2, 6, 0, 8, 1, 7}},
      {Join({Tokens(0, 6, 7), Tokens(1, 3, 3), Tokens(2, 39, 2)}), {8, 8, 7, 7, 6, 6}},
  };
  std::map<int64_t, std::vector<double>> states;
  for (const auto& [tokens, pages] : calls) {
    Step<Op> step(c, tokens);
    const Status status = net.Run(device, &step, pages);
    ASSERT_TRUE(status.ok()) << status.message();
    for (size_t place = 0; place < step.sequences().size(); ++place) {
      std::vector<double>& state = states[step.sequences()[place]];
      if (state.empty()) state.resize(static_cast<size_t>(c.sizes.state_elements()));
      const std::string what = fmt::format("sequence {}", step.sequences()[place]);
      const std::vector<int64_t> rows = step.Taking(place);
      const std::vector<double> want = Op::Reference(step.inputs(), net.weights(), rows, &state);
      std::vector<double> got;
      for (const int64_t row : rows) {
        const std::vector<double> out = step.OutOf(row);
        got.insert(got.end(), out.begin(), out.end());
      }
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_NEAR(got[i], want[i], 2e-4 + Unit(c.out) * std::abs(want[i])) << what << " at " << i;
      }
      ExpectStateNear(net.State(pages[2 * place + 1]), state, what);
    }
  }
}

/// The cases of a test that takes long in a simulator, which has the first of them alone.
template <class Case>
std::span<const Case> CasesOn(const Device& device, std::span<const Case> cases) {
  return device.info().name == "metal-sim" ? cases.first(1) : cases;
}

/// |got - want| / |want|
inline double DistanceOf(const std::vector<double>& got, const std::vector<double>& want) {
  double error = 0;
  double size = 1e-30;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(error / size);
}

/// Sequences that a device may run in chunks, from their begin and then from their states, in
/// place: each is as near to the reference as `most` says. Repeats have the same bits.
template <class Op>
void ExpectLongSequencesAreTheReference(const Device& device, const typename Op::Case& c,
                                        double most) {
  Net<Op> net(c);
  Net<Op> again(c);
  const std::vector<Token> calls[] = {
      Join({Tokens(0, 0, 65), Tokens(1, 0, 1), Tokens(2, 0, 200), Tokens(3, 0, 17),
            Tokens(4, 0, 64)}),
      Join({Tokens(0, 65, 3), Tokens(1, 1, 128), Tokens(2, 200, 1), Tokens(3, 17, 70),
            Tokens(4, 64, 16)}),
  };
  const std::vector<int32_t> pages[] = {{-1, 0, -1, 1, -1, 2, -1, 6, -1, 7},
                                        {0, 0, 1, 1, 2, 2, 6, 6, 7, 8}};
  std::map<int64_t, std::vector<double>> states;
  for (size_t call = 0; call < std::size(calls); ++call) {
    Step<Op> step(c, calls[call]);
    const Status status = net.Run(device, &step, pages[call]);
    ASSERT_TRUE(status.ok()) << status.message();
    const std::vector<double> out = reference::Elements(step.out());
    ASSERT_TRUE(again.Run(device, &step, pages[call]).ok());
    EXPECT_EQ(reference::Elements(step.out()), out) << "a repeat";
    const auto width = static_cast<int64_t>(out.size()) / step.rows();
    for (size_t place = 0; place < step.sequences().size(); ++place) {
      std::vector<double>& state = states[step.sequences()[place]];
      if (state.empty()) state.resize(static_cast<size_t>(c.sizes.state_elements()));
      const std::vector<double> want =
          Op::Reference(step.inputs(), net.weights(), step.Taking(place), &state);
      const std::vector<double> got(out.begin() + step.FirstRow(place) * width,
                                    out.begin() + step.FirstRow(place + 1) * width);
      EXPECT_LE(DistanceOf(got, want), most) << "call " << call << ", sequence " << place;
      const std::vector<float> after = net.State(pages[call][2 * place + 1]);
      EXPECT_EQ(again.State(pages[call][2 * place + 1]), after) << "a repeat";
      EXPECT_LE(DistanceOf({after.begin(), after.end()}, state), most)
          << "state after call " << call << ", sequence " << place;
    }
  }
}

/// The results and the last state of 41 tokens, divided into calls.
template <class Op>
std::pair<std::vector<double>, std::vector<float>> Divided(const Device& device,
                                                           const typename Op::Case& c,
                                                           const std::vector<int64_t>& counts,
                                                           bool in_place) {
  Net<Op> net(c);
  std::vector<double> out;
  int32_t page = -1;
  int64_t first = 0;
  for (const int64_t count : counts) {
    // Another sequence before it moves its rows.
    Step<Op> step(c, Join({Tokens(1, first, 2), Tokens(0, first, count)}));
    const int32_t next = in_place || page != 0 ? 0 : 2;
    const std::vector<float> before = page < 0 ? std::vector<float>() : net.State(page);
    const Status status = net.Run(device, &step, {-1, 1, page, next}, Determinism::kBatchInvariant);
    EXPECT_TRUE(status.ok()) << status.message();
    if (page >= 0 && page != next) {
      EXPECT_EQ(net.State(page), before) << "a page that is read";
    }
    page = next;
    for (int64_t row = 2; row < step.rows(); ++row) {
      const std::vector<double> values = step.OutOf(row);
      out.insert(out.end(), values.begin(), values.end());
    }
    first += count;
  }
  return {out, net.State(page)};
}

template <class Op>
void ExpectSameBitsHoweverDivided(const Device& device, const typename Op::Case& c) {
  const auto whole = Divided<Op>(device, c, {41}, true);
  const std::vector<int64_t> divisions[] = {
      {4, 1, 36}, {1, 2, 38}, {40, 1}, std::vector<int64_t>(41, 1)};
  for (const std::vector<int64_t>& counts : divisions) {
    for (const bool in_place : {true, false}) {
      const auto parts = Divided<Op>(device, c, counts, in_place);
      EXPECT_EQ(parts.first, whole.first) << "first part " << counts[0];
      EXPECT_EQ(parts.second, whole.second) << "first part " << counts[0];
    }
  }
}

template <class Op>
void ExpectOthersChangeNothing(const Device& device, const typename Op::Case& c) {
  Net<Op> net(c);
  Net<Op> other(c);
  Step<Op> begin(c, Tokens(0, 0, 6));
  Step<Op> without(c, Tokens(0, 6, 3));
  std::vector<Token> tokens = Tokens(0, 6, 5);
  tokens[1] = {0, 40, false};
  tokens[2].index = 7;
  tokens[3].index = 8;
  tokens[4] = {0, 41, false};
  // The second sequence has no other row, and no page; the third one keeps its state.
  tokens.push_back({1, 0, false});
  tokens.push_back({2, 0, false});
  Step<Op> with(c, tokens);
  ASSERT_TRUE(net.Run(device, &begin, {-1, 0}).ok());
  ASSERT_TRUE(other.Run(device, &begin, {-1, 0}).ok());
  ASSERT_TRUE(other.Run(device, &begin, {-1, 1}).ok());
  ASSERT_TRUE(net.Run(device, &without, {0, 0}).ok());
  const Status status = other.Run(device, &with, {0, 0, -1, -1, 1, 2});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(net.State(0), other.State(0));
  EXPECT_EQ(other.State(1), other.State(2));
  const int64_t rows[] = {0, 2, 3};
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(with.OutOf(rows[i]), without.OutOf(i));
}

/// A call that is valid until something of it is changed.
template <class Op>
struct Call {
  typename Op::Inputs inputs;
  typename Op::Weights weights;
  RecurrentRows rows;
  RecurrentStates states;
  MutableTensorView out;
};

template <class Op>
class RecurrentCalls : public ::testing::Test {
 protected:
  explicit RecurrentCalls(const typename Op::Case& c) : step_(c, Tokens(0, 0, 4)), net_(c) {}

  template <typename Change>
  void ExpectRefused(const std::string& text, const Change& change) {
    Call<Op> call{step_.inputs(), net_.weights(), step_.Rows(pages_), net_.states(), step_.out()};
    change(call);
    Status status = Op::Run(device_, call.inputs, call.weights, call.rows, call.states, call.out,
                            Determinism::kDefault);
    if (status.ok()) status = device_.Synchronize();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << text;
    EXPECT_NE(status.message().find(text), std::string::npos)
        << text << ", not " << status.message();
  }

  /// Arguments that all operations check alike: rows, pages and states.
  void ExpectWrongRowsAndStatesAreRefused() {
    using Changed = Call<Op>;
    ExpectRefused("pages: expected i32 [1, 2]",
                  [](Changed& call) { call.rows.pages = call.rows.positions; });
    ExpectRefused("positions: expected i32 [4]",
                  [](Changed& call) { call.rows.positions = call.rows.first_rows; });
    ExpectRefused("do not fit in", [](Changed& call) { call.states.page_stride = 64; });
    ExpectRefused("first_element: expected a multiple of 32",
                  [](Changed& call) { call.states.first_element = 48; });
    ExpectRefused("out: overlaps the states", [&](Changed& call) {
      call.out = MutableTensorView(net_.states().slabs[0], DType::kF32, call.out.shape());
    });
    ExpectRefused("out: ", [](Changed& call) {
      call.out = MutableTensorView(const_cast<void*>(call.inputs.values.data()), DType::kF32,
                                   call.out.shape());
    });
    Tensor half(DType::kF16, step_.out().shape());
    ExpectRefused("out: expected f32 or bf16", [&](Changed& call) { call.out = half.view(); });
    pages_ = {3, 0};
    ExpectRefused("no page 3 for sequence 0", [](Changed&) {});
    pages_ = {0, 9};
    ExpectRefused("no page 9 for sequence 0", [](Changed&) {});
    pages_ = {0, -1};
    ExpectRefused("no page -1 for sequence 0", [](Changed&) {});
    pages_ = {-2, 0};
    ExpectRefused("no page -2 for sequence 0", [](Changed&) {});
    pages_ = {-1, 0};
    const std::vector<int32_t> beyond = {0, 5};  // Where a GPU can read it, too.
    ExpectRefused("first_rows: ", [&](Changed& call) {
      call.rows.first_rows = TensorView(beyond.data(), DType::kI32, {2});
    });
  }

  Device device_ = *Device::Open(TestDevice());
  Step<Op> step_;
  Net<Op> net_;
  std::vector<int32_t> pages_ = {-1, 0};
};

}  // namespace marlin::recurrent_test
