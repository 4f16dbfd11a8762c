// Parts of models for tests of the persistent kernel, and what they compute, in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "backends/cuda/common/tile_gemm.h"
#include "backends/cuda/moe/router/token_router.cuh"
#include "backends/cuda/persistent/persistent_layout.h"
#include "tiled_weights.h"

namespace marlin::cuda {

using Vector = std::vector<double>;

/// Random numbers of about unit size, aligned for bulk copies.
class Floats {
 public:
  Floats(int count, uint32_t seed, float mean = 0.0f)
      : memory_(static_cast<size_t>(count + 3) / 4) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(mean, mean == 0.0f ? 1.0f : 0.2f);
    for (int i = 0; i < count; ++i) data()[i] = normal(random);
  }
  float* data() { return reinterpret_cast<float*>(memory_.data()); }
  const float* data() const { return reinterpret_cast<const float*>(memory_.data()); }

 private:
  std::vector<float4> memory_;
};

/// A matrix whose outputs are about as large as its inputs.
class Matrix {
 public:
  Matrix(int k, int n, int group_size, uint32_t seed, ZeroKind zeros = ZeroKind::kNone,
         CodeKind kind = CodeKind::kFp4)
      : weights_({kind, k, n, group_size, zeros}, seed), kind_(kind), k_(k), n_(n) {
    double squares = 0;
    for (int i = 0; i < k; ++i) squares += weights_.At(i, i % n) * weights_.At(i, i % n);
    factor_ = static_cast<float>(1 / std::sqrt(squares));
  }

  Vector Product(const Vector& x) const {
    Vector out(static_cast<size_t>(n_));
    for (int n = 0; n < n_; ++n) {
      double sum = 0;
      for (int k = 0; k < k_; ++k) sum += x[static_cast<size_t>(k)] * weights_.At(k, n);
      out[static_cast<size_t>(n)] = sum * factor_;
    }
    return out;
  }
  /// As PersistentDescription.
  PhaseGemm Gemm() const {
    PhaseGemm gemm;
    gemm.weights = weights_.view();
    gemm.weights.multiplier = weights_.Multiplier(true) * factor_;
    gemm.use = UseOf(gemm.weights, kind_);
    gemm.n = n_;
    gemm.strips = (n_ + kStripOutputs - 1) / kStripOutputs;
    gemm.k_tiles = gemm.weights.tiles_of_strip;
    return gemm;
  }

 private:
  TiledWeights weights_;
  CodeKind kind_;
  int k_;
  int n_;
  float factor_;
};

inline double Silu(double x) { return x / (1 + std::exp(-x)); }
inline double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct Mlp {
  Matrix gate;
  Matrix up;
  Matrix down;

  Mlp(int features, int inner, int group_size, uint32_t seed, CodeKind kind = CodeKind::kFp4)
      : gate(features, inner, group_size, seed, ZeroKind::kNone, kind),
        up(features, inner, group_size, seed + 1, ZeroKind::kNone, kind),
        down(inner, features, group_size, seed + 2, ZeroKind::kNone, kind) {}

  Vector Run(const Vector& x) const {
    Vector h = gate.Product(x);
    const Vector u = up.Product(x);
    for (size_t i = 0; i < h.size(); ++i) h[i] = Silu(h[i]) * u[i];
    return down.Product(h);
  }
  PhaseGemm Gates() const {
    PhaseGemm gemm = gate.Gemm();
    const PhaseGemm second = up.Gemm();
    gemm.sides = 2;
    gemm.up_tiles = second.weights.tiles;
    gemm.up_multiplier = second.weights.multiplier;
    return gemm;
  }
  PersistentExpert Expert() const {
    const PhaseGemm gates = Gates();
    const PhaseGemm downs = down.Gemm();
    return {
        gates.weights.tiles,      gates.up_tiles,      downs.weights.tiles,     nullptr, nullptr,
        gates.weights.multiplier, gates.up_multiplier, downs.weights.multiplier};
  }
};

inline constexpr double kEpsilon = 1e-5;

/// After an RMS norm.
inline Vector Normalized(const Vector& x, const float* weights) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  const double factor = 1 / std::sqrt(squares / static_cast<double>(x.size()) + kEpsilon);
  Vector out(x);
  for (size_t i = 0; i < x.size(); ++i) out[i] *= factor * weights[i];
  return out;
}

/// Relative to `wanted`.
inline double Distance(const float* found, const Vector& wanted) {
  double difference = 0;
  double size = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    difference += std::pow(found[i] - wanted[i], 2);
    size += wanted[i] * wanted[i];
  }
  return std::sqrt(difference / size);
}

/// A router to two of six experts: by logits, or with `sigmoid` by sigmoids and biases, of the
/// better two of `groups`, if these are three.
inline constexpr int kExperts = 6;
inline constexpr int kTopK = 2;
inline constexpr double kScaling = 1.5;
inline PersistentRouter RouterToTwo(bool sigmoid, int groups) {
  PersistentRouter router = {.experts = kExperts, .top_k = kTopK, .scaling_factor = kScaling};
  if (!sigmoid) return router;
  router.scoring = kSigmoid;
  router.groups = groups;
  router.top_groups = groups == 1 ? 1 : 2;
  return router;
}

/// Adds a shared expert's tiles, of `parts` parts, to the experts' phase.
inline void JoinTiles(const PhaseGemm& its, int parts, PhaseGemm* gemm) {
  gemm->shared = its.weights;
  gemm->shared_selection = kTopK;
  gemm->shared_parts = parts;
  gemm->use = std::max(gemm->use, its.use);
}

/// The experts' weights; those that are not selected have 0. `bias`: null without biases. `margin`
/// becomes no more than the one between the last selected expert and the next one.
inline Vector RouteToTwo(const PersistentRouter& router, const Vector& logits, const float* bias,
                         double* margin) {
  Vector scores;
  Vector choices;
  for (size_t e = 0; e < kExperts; ++e) {
    scores.push_back(router.scoring == kSigmoid ? Sigmoid(logits[e]) : std::exp(logits[e]));
    choices.push_back(scores.back() + (bias != nullptr ? bias[e] : 0.0));
  }
  if (router.groups == 3) {
    const auto group = [&](size_t g) { return choices[2 * g] + choices[2 * g + 1]; };
    size_t worst = 0;
    for (const size_t g : {size_t{1}, size_t{2}}) worst = group(g) < group(worst) ? g : worst;
    choices[2 * worst] = choices[2 * worst + 1] = -1e9;
  }
  Vector sorted = choices;
  std::ranges::sort(sorted);
  const double last = sorted[kExperts - kTopK];
  const double next = sorted[kExperts - kTopK - 1];
  *margin = std::min(*margin, (last - next) / std::max(std::abs(last), std::abs(next)));
  Vector weights(kExperts);
  double sum = 0;
  for (int i = 0; i < kTopK; ++i) {
    const auto best = static_cast<size_t>(std::ranges::max_element(choices) - choices.begin());
    choices[best] = -1e9;
    weights[best] = scores[best];
    sum += scores[best];
  }
  for (double& weight : weights) weight *= kScaling / sum;
  return weights;
}

}  // namespace marlin::cuda
