// GatedDelta against its reference on every ISA level of this CPU: several sequences of different
// lengths, states in place and in other pages, and the same bits however sequences are divided.
#include "reference/gated_delta.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "decoder_fixture.h"
#include "marlin/recurrent.h"

namespace marlin::gated_delta_test {
namespace {

using ::testing::HasSubstr;

using GatedDeltaOnEveryLevel = OnEveryLevel;
MARLIN_ON_EVERY_LEVEL(GatedDeltaOnEveryLevel);

struct DeltaCase {
  GatedDeltaSizes sizes;  ///< Key heads, value heads, key_dim, value_dim, conv_width.
  bool by_head;           ///< Each key head's projections are side by side.
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

/// A token of a sequence: the same numbers in every call. Position -1: it takes no part.
struct Token {
  int64_t sequence;
  int64_t index;
  bool takes_part = true;
};

/// The arguments of a call for some tokens, each sequence's in its order.
class Step {
 public:
  Step(const DeltaCase& c, const std::vector<Token>& tokens)
      : sizes_(c.sizes),
        rows_(static_cast<int64_t>(tokens.size())),
        heads_(c.sizes.value_heads / c.sizes.key_heads),
        out_(c.out, {rows_, c.sizes.value_heads, c.sizes.value_dim}, 3) {
    const int64_t keys = sizes_.key_dim;
    const int64_t values = heads_ * sizes_.value_dim;
    const int64_t widths[] = {keys, keys, values, values, heads_, heads_};
    int64_t first = 0;
    for (const int64_t width : widths) {
      Tensor& own = tensors_.emplace_back(
          DType::kF32,
          Shape{rows_, sizes_.key_heads, c.by_head ? 2 * (keys + values + heads_) : width},
          c.by_head ? 0 : 5);
      MutableTensorView view = own.view();
      if (c.by_head) {
        MutableTensorView part(tensors_.front().view().As<float>() + first, DType::kF32,
                               {rows_, sizes_.key_heads, width});
        part.set_stride(0, view.stride(0));
        part.set_stride(1, view.stride(1));
        view = part;
      }
      views_.push_back(view);
      first += width;
    }
    for (int64_t row = 0; row < rows_; ++row) Fill(tokens[static_cast<size_t>(row)], row);
    int64_t sequence = -1;
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i].sequence != sequence) Begin(sequence = tokens[i].sequence);
      positions_.push_back(tokens[i].takes_part ? static_cast<int32_t>(tokens[i].index) : -1);
    }
    first_rows_.push_back(static_cast<int32_t>(rows_));
  }

  GatedDeltaInputs inputs() const {
    return {views_[0], views_[1], views_[2], views_[3], views_[4], views_[5]};
  }
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
    const int64_t count = sizes_.value_heads * sizes_.value_dim;
    const std::vector<double> all = reference::Elements(out_.view());
    return {all.begin() + row * count, all.begin() + (row + 1) * count};
  }

 private:
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

  GatedDeltaSizes sizes_;
  int64_t rows_;
  int64_t heads_;
  std::vector<Tensor> tensors_;
  std::vector<MutableTensorView> views_;
  std::vector<int32_t> positions_, first_rows_;
  std::vector<int64_t> sequences_;
  Tensor out_;
};

/// A net's parameters, and states in three slabs, of which one is not allocated.
class Net {
 public:
  static constexpr int64_t kSlabPages = 3;

  explicit Net(const DeltaCase& c)
      : case_(c),
        conv_(DType::kF32, {c.sizes.channels(), c.sizes.conv_width}),
        log_decay_(DType::kF32, {c.sizes.value_heads}),
        decay_bias_(DType::kF32, {c.sizes.value_heads}),
        norm_(DType::kF32, {c.sizes.value_dim}),
        stride_((c.sizes.state_elements() + 127) / 32 * 32) {
    conv_.Fill(1, 0.6);
    log_decay_.Fill(2);
    decay_bias_.Fill(3);
    norm_.Fill(4);
    for (auto& slab : memory_) slab.assign(static_cast<size_t>(kSlabPages * stride_), NAN);
    for (size_t i = 0; i < std::size(memory_); ++i)
      slabs_[i] = i == 1 ? nullptr : memory_[i].data();
  }

  GatedDeltaWeights weights() {
    return {conv_.view(), log_decay_.view(), decay_bias_.view(), norm_.view(), 1e-5F, case_.sizes};
  }
  RecurrentStates states() const { return {slabs_, kSlabPages, stride_, 64}; }
  Status Run(const Device& device, Step* step, const std::vector<int32_t>& pages,
             Determinism determinism = Determinism::kDefault) {
    const Status status = GatedDelta(device, step->inputs(), weights(), step->Rows(pages), states(),
                                     step->out(), determinism);
    return status.ok() ? device.Synchronize() : status;
  }
  std::vector<float> State(int32_t page) const {
    const auto first = static_cast<size_t>(page % kSlabPages * stride_ + 64);
    const std::vector<float>& slab = memory_[static_cast<size_t>(page / kSlabPages)];
    const auto begin = slab.begin() + static_cast<std::ptrdiff_t>(first);
    std::vector<float> state(begin, begin + case_.sizes.state_elements());
    // The gap before the states of the heads belongs to neither.
    const int64_t kept = (case_.sizes.conv_width - 1) * case_.sizes.channels();
    std::fill(state.begin() + kept, state.begin() + case_.sizes.conv_elements(), 0.0F);
    return state;
  }

 private:
  const DeltaCase& case_;
  Tensor conv_, log_decay_, decay_bias_, norm_;
  int64_t stride_;
  std::vector<float> memory_[3];
  void* slabs_[3] = {};
};

std::vector<Token> Tokens(int64_t sequence, int64_t first, int64_t count) {
  std::vector<Token> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back({sequence, first + i});
  return tokens;
}

std::vector<Token> Join(const std::vector<std::vector<Token>>& parts) {
  std::vector<Token> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

void ExpectStateNear(const std::vector<float>& got, const std::vector<double>& want,
                     const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(got[i]), want[i], 2e-5 * (1 + std::abs(want[i])))
        << what << ": state at " << i;
  }
}

TEST_P(GatedDeltaOnEveryLevel, IsItsReferenceInStepsOfSeveralSequences) {
  for (const DeltaCase& c : kCases) {
    Net net(c);
    // Sequence s keeps its state in page 8 - s from its second call on.
    const std::vector<std::pair<std::vector<Token>, std::vector<int32_t>>> calls = {
        {Join({Tokens(0, 0, 5), Tokens(1, 0, 1), Tokens(2, 0, 18)}), {-1, 0, -1, 1, -1, 2}},
        {Join({Tokens(2, 18, 1), Tokens(0, 5, 1), Tokens(1, 1, 2)}), {2, 6, 0, 8, 1, 7}},
        {Join({Tokens(0, 6, 7), Tokens(1, 3, 3), Tokens(2, 19, 2)}), {8, 8, 7, 7, 6, 6}},
    };
    std::map<int64_t, std::vector<double>> states;
    for (const auto& [tokens, pages] : calls) {
      Step step(c, tokens);
      const Status status = net.Run(device(), &step, pages);
      ASSERT_TRUE(status.ok()) << status.message();
      for (size_t place = 0; place < step.sequences().size(); ++place) {
        std::vector<double>& state = states[step.sequences()[place]];
        if (state.empty()) state.resize(static_cast<size_t>(c.sizes.state_elements()));
        const std::string what = fmt::format("{}: sequence {}", NameOf(c), step.sequences()[place]);
        const std::vector<int64_t> rows = step.Taking(place);
        const std::vector<double> want =
            reference::GatedDelta(step.inputs(), net.weights(), c.sizes, rows, &state);
        std::vector<double> got;
        for (const int64_t row : rows) {
          const std::vector<double> out = step.OutOf(row);
          got.insert(got.end(), out.begin(), out.end());
        }
        ASSERT_EQ(got.size(), want.size());
        for (size_t i = 0; i < got.size(); ++i) {
          ASSERT_NEAR(got[i], want[i], 2e-4 + Unit(c.out) * std::abs(want[i]))
              << what << " at " << i;
        }
        ExpectStateNear(net.State(pages[2 * place + 1]), state, what);
      }
    }
  }
}

/// The results and the last state of 21 tokens, divided into calls.
std::pair<std::vector<double>, std::vector<float>> Divided(const Device& device, const DeltaCase& c,
                                                           const std::vector<int64_t>& counts,
                                                           bool in_place) {
  Net net(c);
  std::vector<double> out;
  int32_t page = -1;
  int64_t first = 0;
  for (const int64_t count : counts) {
    // Another sequence before it moves its rows.
    Step step(c, Join({Tokens(1, first, 2), Tokens(0, first, count)}));
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

TEST_P(GatedDeltaOnEveryLevel, HasTheSameBitsHoweverASequenceIsDivided) {
  for (const DeltaCase& c : kCases) {
    const auto whole = Divided(device(), c, {21}, true);
    const std::vector<int64_t> divisions[] = {
        {4, 1, 16}, {1, 2, 18}, {20, 1}, std::vector<int64_t>(21, 1)};
    for (const std::vector<int64_t>& counts : divisions) {
      for (const bool in_place : {true, false}) {
        const auto parts = Divided(device(), c, counts, in_place);
        EXPECT_EQ(parts.first, whole.first) << NameOf(c) << ", first part " << counts[0];
        EXPECT_EQ(parts.second, whole.second) << NameOf(c) << ", first part " << counts[0];
      }
    }
  }
}

TEST_P(GatedDeltaOnEveryLevel, RowsThatTakeNoPartChangeNothing) {
  const DeltaCase& c = kCases[2];
  Net net(c);
  Net other(c);
  Step begin(c, Tokens(0, 0, 6));
  Step without(c, Tokens(0, 6, 3));
  std::vector<Token> tokens = Tokens(0, 6, 5);
  tokens[1] = {0, 40, false};
  tokens[2].index = 7;
  tokens[3].index = 8;
  tokens[4] = {0, 41, false};
  // The second sequence has no other row, and no page; the third one keeps its state.
  tokens.push_back({1, 0, false});
  tokens.push_back({2, 0, false});
  Step with(c, tokens);
  ASSERT_TRUE(net.Run(device(), &begin, {-1, 0}).ok());
  ASSERT_TRUE(other.Run(device(), &begin, {-1, 0}).ok());
  ASSERT_TRUE(other.Run(device(), &begin, {-1, 1}).ok());
  ASSERT_TRUE(net.Run(device(), &without, {0, 0}).ok());
  const Status status = other.Run(device(), &with, {0, 0, -1, -1, 1, 2});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(net.State(0), other.State(0));
  EXPECT_EQ(other.State(1), other.State(2));
  const int64_t rows[] = {0, 2, 3};
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(with.OutOf(rows[i]), without.OutOf(i));
}

/// A call that is valid until something of it is changed.
struct Call {
  GatedDeltaInputs inputs;
  GatedDeltaWeights weights;
  RecurrentRows rows;
  RecurrentStates states;
  MutableTensorView out;
};

class GatedDeltaCalls : public ::testing::Test {
 protected:
  GatedDeltaCalls() : step_(kCases[0], Tokens(0, 0, 4)), net_(kCases[0]) {}

  template <typename Change>
  void ExpectRefused(const std::string& text, const Change& change) {
    Call call{step_.inputs(), net_.weights(), step_.Rows(pages_), net_.states(), step_.out()};
    change(call);
    Status status =
        GatedDelta(device_, call.inputs, call.weights, call.rows, call.states, call.out);
    if (status.ok()) status = device_.Synchronize();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(status.message(), HasSubstr(text));
  }

  Device device_ = *Device::Open(TestDevice());
  Step step_;
  Net net_;
  std::vector<int32_t> pages_ = {-1, 0};
};

TEST_F(GatedDeltaCalls, WrongShapesAreRefused) {
  ExpectRefused("sizes: 5 value heads are not a multiple of 2",
                [](Call& call) { call.weights.sizes.value_heads = 5; });
  ExpectRefused("conv_width: expected 1..16, got 17",
                [](Call& call) { call.weights.sizes.conv_width = 17; });
  ExpectRefused("out: expected", [](Call& call) { call.weights.sizes.value_dim = 15; });
  ExpectRefused("queries: expected", [](Call& call) { call.inputs.queries = call.inputs.values; });
  ExpectRefused("decays: expected", [](Call& call) { call.inputs.decays = call.inputs.gates; });
  ExpectRefused("conv: expected", [](Call& call) { call.weights.sizes.conv_width = 3; });
  ExpectRefused("log_decay: ", [](Call& call) { call.weights.log_decay = call.weights.norm; });
  ExpectRefused("norm: ", [](Call& call) { call.weights.norm = TensorView(); });
  ExpectRefused("epsilon: ", [](Call& call) { call.weights.epsilon = -1; });
  ExpectRefused("pages: expected i32 [1, 2]",
                [](Call& call) { call.rows.pages = call.rows.positions; });
  ExpectRefused("positions: expected i32 [4]",
                [](Call& call) { call.rows.positions = call.rows.first_rows; });
}

TEST_F(GatedDeltaCalls, WrongMemoryIsRefused) {
  ExpectRefused("do not fit in", [](Call& call) { call.states.page_stride = 64; });
  ExpectRefused("first_element: expected a multiple of 32",
                [](Call& call) { call.states.first_element = 48; });
  ExpectRefused("out: overlaps the states", [&](Call& call) {
    call.out = MutableTensorView(net_.states().slabs[0], DType::kF32, call.out.shape());
  });
  ExpectRefused("out: ", [](Call& call) {
    call.out = MutableTensorView(const_cast<void*>(call.inputs.values.data()), DType::kF32,
                                 call.out.shape());
  });
  Tensor half(DType::kF16, step_.out().shape());
  ExpectRefused("out: expected f32 or bf16", [&](Call& call) { call.out = half.view(); });
}

TEST_F(GatedDeltaCalls, WrongContentsAreRefused) {
  pages_ = {3, 0};
  ExpectRefused("no page 3 for sequence 0", [](Call&) {});
  pages_ = {0, 9};
  ExpectRefused("no page 9 for sequence 0", [](Call&) {});
  pages_ = {0, -1};
  ExpectRefused("no page -1 for sequence 0", [](Call&) {});
  pages_ = {-2, 0};
  ExpectRefused("no page -2 for sequence 0", [](Call&) {});
  pages_ = {-1, 0};
  const std::vector<int32_t> beyond = {0, 5};  // Where a GPU can read it, too.
  ExpectRefused("first_rows: ", [&](Call& call) {
    call.rows.first_rows = TensorView(beyond.data(), DType::kI32, {2});
  });
}

}  // namespace
}  // namespace marlin::gated_delta_test
