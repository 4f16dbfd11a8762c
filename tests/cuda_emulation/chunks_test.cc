// Recurrent states in chunks on the host: as row by row, and the same bits whether or not shared
// memory has room for keys and queries.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "backends/cuda/recurrent/chunked/chunk_launch.h"
#include "backends/cuda/recurrent/mamba2/mamba2_launch.h"
#include "cuda_emulation/emulate.h"

namespace marlin::cuda {
namespace {

constexpr int kAllShared = 227 * 1024;
constexpr int kLittleShared = 99 * 1024;
constexpr int kWidth = 4;

/// Two sequences in chunks with one between them that is not, and rows that take no part.
constexpr int kFirstRows[] = {0, 150, 155, 195};
constexpr int kSequences = 3;
constexpr int kRows = 195;
constexpr int kChunks = 4;

double SoftPlusOf(double x) { return std::log1p(std::exp(x)); }
double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// Inputs, states and what kernels write of a mixer.
class Mixer {
 public:
  Mixer(int key_heads, int value_heads, int key_dim, int value_dim, RecurrentArguments* args)
      : args_(*args) {
    args->key_heads = key_heads;
    args->value_heads = value_heads;
    args->key_dim = key_dim;
    args->value_dim = value_dim;
    args->conv_width = kWidth;
    args->most_rows = kMostRecurrentRows;
    positions_.assign(kRows, 0);
    for (const int row : {3, 70, 71, 160}) positions_[static_cast<size_t>(row)] = -1;
    tables_ = {0, 1, 2, 3, -1, 4};
    args->sequences = {positions_.data(), kFirstRows, tables_.data(), kRows, kSequences, 2};
    page_ = args->conv_elements() + int64_t{value_heads} * key_dim * value_dim;
    args->states.slab_count = 1;
    args->states.slab_pages = 5;
    args->states.page_stride = page_;
    args->errors = {&record_, &any_};
    conv_ = Draw(args->channels() * kWidth, 0.5f);
    args->conv = conv_.data();
    start_ = Draw(5 * page_, 0.5f);
  }

  std::vector<float> Draw(int64_t count, float scale) {
    std::vector<float> drawn(static_cast<size_t>(count));
    for (float& x : drawn) x = normal_(random_) * scale;
    return drawn;
  }
  HeadsView DrawHeads(int heads, int features, std::vector<float>* memory) {
    *memory = Draw(int64_t{kRows} * heads * features, 1.0f);
    return {memory->data(), int64_t{heads} * features, features};
  }

  /// Before a run.
  void Begin() {
    states_ = start_;
    args_.states.slabs[0] = states_.data();
    sums_.assign(static_cast<size_t>(kRows * args_.value_heads * args_.value_dim), 0.0f);
    args_.sums = sums_.data();
  }
  std::vector<float> Results() const {
    std::vector<float> all = sums_;
    all.insert(all.end(), states_.begin(), states_.end());
    return all;
  }

  /// The convolution of a channel at a row; `input(row)` is the channel's input.
  template <typename Input>
  double Convolve(int sequence, int row, int64_t channel, double bias, const Input& input) const {
    std::vector<double> inputs;
    for (int r = row; r >= kFirstRows[sequence]; --r) {
      if (positions_[static_cast<size_t>(r)] >= 0) inputs.push_back(input(r));
    }
    const int from = tables_[static_cast<size_t>(2 * sequence)];
    for (int slot = kWidth - 2; slot >= 0; --slot) {
      const int64_t at = from * page_ + slot * args_.channels() + channel;
      inputs.push_back(from < 0 ? 0 : start_[static_cast<size_t>(at)]);
    }
    double sum = bias;
    for (int i = 0; i < kWidth; ++i) {
      sum += inputs[static_cast<size_t>(i)] *
             conv_[static_cast<size_t>(channel * kWidth + kWidth - 1 - i)];
    }
    return sum * Sigmoid(sum);
  }

  /// Runs step(sequence, row, state) for the rows in chunks of a head, and compares the state.
  /// step returns S^T q [value_dim].
  template <typename Step>
  void ExpectHead(int head, const Step& step) const {
    const int64_t elements = int64_t{args_.key_dim} * args_.value_dim;
    const int64_t place = args_.conv_elements() + head * elements;
    for (const int sequence : {0, 2}) {
      const int from = tables_[static_cast<size_t>(2 * sequence)];
      std::vector<double> state(static_cast<size_t>(elements));
      if (from >= 0) {
        std::copy_n(start_.begin() + from * page_ + place, elements, state.begin());
      }
      for (int row = kFirstRows[sequence]; row < kFirstRows[sequence + 1]; ++row) {
        if (positions_[static_cast<size_t>(row)] < 0) continue;
        const std::vector<double> want = step(sequence, row, state);
        for (int i = 0; i < args_.value_dim; ++i) {
          const int at = (row * args_.value_heads + head) * args_.value_dim + i;
          ASSERT_NEAR(sums_[static_cast<size_t>(at)], want[static_cast<size_t>(i)],
                      0.02 + 0.002 * std::abs(want[static_cast<size_t>(i)]))
              << "row " << row << ", feature " << i;
        }
      }
      const int to = tables_[static_cast<size_t>(2 * sequence + 1)];
      for (int64_t i = 0; i < elements; ++i) {
        ASSERT_NEAR(states_[static_cast<size_t>(to * page_ + place + i)],
                    state[static_cast<size_t>(i)],
                    0.02 + 0.002 * std::abs(state[static_cast<size_t>(i)]))
            << "sequence " << sequence << ", element " << i;
      }
    }
  }

 private:
  RecurrentArguments& args_;
  std::mt19937 random_{1};
  std::normal_distribution<float> normal_;
  std::vector<int32_t> positions_;
  std::vector<int32_t> tables_;
  int64_t page_ = 0;
  std::vector<float> conv_;
  std::vector<float> start_;
  std::vector<float> states_;
  std::vector<float> sums_;
  ValueRecord record_;
  int any_ = 0;
};

float InputAt(const HeadsView& view, int row, int head, int feature) {
  return view.At(row, head)[feature];
}

void ExpectMamba2(int key_dim) {
  constexpr int kHeads = 2;
  constexpr int kValueDim = 64;
  SsdArguments turn;
  Mamba2Arguments& args = turn.mamba;
  Mixer mixer(1, kHeads, key_dim, kValueDim, &args);
  std::vector<float> values;
  std::vector<float> keys;
  std::vector<float> queries;
  std::vector<float> steps;
  args.values = mixer.DrawHeads(kHeads, kValueDim, &values);
  args.keys = mixer.DrawHeads(1, key_dim, &keys);
  args.queries = mixer.DrawHeads(1, key_dim, &queries);
  args.steps = mixer.DrawHeads(kHeads, 1, &steps);
  const std::vector<float> bias = mixer.Draw(args.channels(), 0.1f);
  const std::vector<float> numbers = mixer.Draw(3 * kHeads, 0.5f);
  args.conv_bias = bias.data();
  args.log_decay = numbers.data();
  args.step_bias = numbers.data() + kHeads;
  args.skip = numbers.data() + 2 * kHeads;
  args.min_step = 0.01f;
  args.max_step = 0.5f;
  std::vector<float> parts(static_cast<size_t>(kChunks * turn.Layout().ChunkFloats()));
  turn.parts = parts.data();
  turn.count = kChunks;
  std::vector<float> results[2];
  for (const int shared_bytes : {kLittleShared, kAllShared}) {
    mixer.Begin();
    LaunchSsdLocal(turn, shared_bytes, nullptr);
    LaunchSsdScan(turn, shared_bytes, nullptr);
    ASSERT_EQ(cuda_emulation::TakeFindings(), "");
    results[shared_bytes == kAllShared ? 1 : 0] = mixer.Results();
  }
  EXPECT_EQ(results[0], results[1]);
  for (int head = 0; head < kHeads; ++head) {
    mixer.ExpectHead(head, [&](int sequence, int row, std::vector<double>& state) {
      const auto conv = [&](const HeadsView& view, int of, int feature, int64_t channel) {
        return mixer.Convolve(sequence, row, channel, bias[static_cast<size_t>(channel)],
                              [&](int r) { return InputAt(view, r, of, feature); });
      };
      const auto h = static_cast<size_t>(head);
      double step = SoftPlusOf(*args.steps.At(row, head) + args.step_bias[h]);
      step = std::clamp(step, 0.01, 0.5);
      const double decay = std::exp(-std::exp(args.log_decay[h]) * step);
      std::vector<double> out(kValueDim);
      std::vector<double> x(kValueDim);
      for (int i = 0; i < kValueDim; ++i) {
        x[static_cast<size_t>(i)] = conv(args.values, head, i, head * kValueDim + i);
        out[static_cast<size_t>(i)] = args.skip[h] * x[static_cast<size_t>(i)];
      }
      for (int k = 0; k < key_dim; ++k) {
        const int64_t channel = kHeads * kValueDim + k;
        const double key = conv(args.keys, 0, k, channel);
        const double query = conv(args.queries, 0, k, channel + key_dim);
        for (int i = 0; i < kValueDim; ++i) {
          double& s = state[static_cast<size_t>(k * kValueDim + i)];
          s = decay * s + step * key * x[static_cast<size_t>(i)];
          out[static_cast<size_t>(i)] += s * query;
        }
      }
      return out;
    });
  }
}

TEST(EmulatedChunks, Mamba2OfFewKeys) { ExpectMamba2(64); }
TEST(EmulatedChunks, Mamba2OfUsualKeys) { ExpectMamba2(128); }
TEST(EmulatedChunks, Mamba2OfManyKeys) { ExpectMamba2(256); }

void ExpectDelta(int key_dim) {
  constexpr int kHeads = 2;
  constexpr int kValueDim = 32;
  ChunkArguments turn;
  GatedDeltaArguments& args = turn.delta;
  Mixer mixer(1, kHeads, key_dim, kValueDim, &args);
  std::vector<float> values;
  std::vector<float> keys;
  std::vector<float> queries;
  std::vector<float> writes;
  std::vector<float> decays;
  args.values = mixer.DrawHeads(1, kHeads * kValueDim, &values);
  args.keys = mixer.DrawHeads(1, key_dim, &keys);
  args.queries = mixer.DrawHeads(1, key_dim, &queries);
  args.writes = mixer.DrawHeads(1, kHeads, &writes);
  args.decays = mixer.DrawHeads(1, kHeads, &decays);
  const std::vector<float> numbers = mixer.Draw(2 * kHeads, 0.5f);
  args.log_decay = numbers.data();
  args.decay_bias = numbers.data() + kHeads;
  args.norms_apart = true;
  std::vector<float> parts(static_cast<size_t>(kChunks * turn.Layout().ChunkFloats()));
  turn.parts = parts.data();
  turn.count = kChunks;
  std::vector<float> results[2];
  for (const int shared_bytes : {kLittleShared, kAllShared}) {
    mixer.Begin();
    LaunchChunkLocal(turn, nullptr);
    LaunchChunkScan(turn, shared_bytes, nullptr);
    ASSERT_EQ(cuda_emulation::TakeFindings(), "");
    results[shared_bytes == kAllShared ? 1 : 0] = mixer.Results();
  }
  EXPECT_EQ(results[0], results[1]);
  for (int head = 0; head < kHeads; ++head) {
    mixer.ExpectHead(head, [&](int sequence, int row, std::vector<double>& state) {
      const auto conv = [&](const HeadsView& view, int feature, int64_t channel) {
        return mixer.Convolve(sequence, row, channel, 0,
                              [&](int r) { return InputAt(view, r, 0, feature); });
      };
      const auto h = static_cast<size_t>(head);
      std::vector<double> query(static_cast<size_t>(key_dim));
      std::vector<double> key(static_cast<size_t>(key_dim));
      double queries_squared = 1e-6;
      double keys_squared = 1e-6;
      for (int k = 0; k < key_dim; ++k) {
        const auto at = static_cast<size_t>(k);
        query[at] = conv(args.queries, k, k);
        key[at] = conv(args.keys, k, key_dim + k);
        queries_squared += query[at] * query[at];
        keys_squared += key[at] * key[at];
      }
      const double decay = std::exp(-std::exp(args.log_decay[h]) *
                                    SoftPlusOf(args.decays.At(row, 0)[h] + args.decay_bias[h]));
      const double write = Sigmoid(args.writes.At(row, 0)[h]);
      std::vector<double> out(kValueDim);
      for (int i = 0; i < kValueDim; ++i) {
        const int feature = head * kValueDim + i;
        double sum = 0;
        for (int k = 0; k < key_dim; ++k) {
          double& s = state[static_cast<size_t>(k * kValueDim + i)];
          s *= decay;
          sum += s * key[static_cast<size_t>(k)] / std::sqrt(keys_squared);
        }
        const double delta = write * (conv(args.values, feature, 2 * key_dim + feature) - sum);
        for (int k = 0; k < key_dim; ++k) {
          double& s = state[static_cast<size_t>(k * kValueDim + i)];
          s += delta * key[static_cast<size_t>(k)] / std::sqrt(keys_squared);
          out[static_cast<size_t>(i)] +=
              s * query[static_cast<size_t>(k)] / std::sqrt(queries_squared * key_dim);
        }
      }
      return out;
    });
  }
}

TEST(EmulatedChunks, DeltaOfFewKeys) { ExpectDelta(64); }
TEST(EmulatedChunks, DeltaOfUsualKeys) { ExpectDelta(128); }

}  // namespace
}  // namespace marlin::cuda
