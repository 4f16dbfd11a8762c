// The inputs of a layer's matrices: which matrices multiply each, and which tensors produce it.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "model/decoder_config.h"
#include "quantize/awq.h"
#include "recipe/decoder_tensors.h"

namespace marlin {

/// The two halves of a layer; each adds to the hidden states.
enum class Half : uint8_t { kAttention, kMlp };
inline constexpr Half kHalves[] = {Half::kAttention, Half::kMlp};

/// A tensor with a matrix of a layer.
struct LayerMatrix {
  std::string tensor;
  Half half = Half::kAttention;
  bool routes = false;  ///< A router, or the gate of a shared expert.
};
/// All matrices of a layer, in the order of its computations.
std::vector<LayerMatrix> LayerMatrices(const LayerTensors& tensors);

/// A matrix that multiplies an input: a tensor, or one expert's part of a tensor that stacks
/// `experts` of them.
struct InputMatrix {
  std::string tensor;
  int64_t expert = -1;  ///< -1: the tensor is one matrix.
  int64_t experts = 1;
};

/// Elements of a vector, or outputs of a linear layer, that produce an input: scale i divides
/// elements[i] of the `size` in the tensor.
struct InputProducer {
  std::string tensor;
  int64_t size = 0;
  std::vector<int64_t> elements;
  bool one_plus = false;  ///< The elements are stored minus 1.
};

/// The number of an input in its half of a layer: ProjectionTensors::input, or kLastSlot.
using InputSlot = size_t;
inline constexpr InputSlot kNormedSlot = 0;  ///< Normalized hidden states.
/// The same by the norms of a router and of experts that are next to an MLP.
inline constexpr InputSlot kRouterSlot = 1;
inline constexpr InputSlot kExpertsSlot = 2;
inline constexpr InputSlot kLastSlot = SIZE_MAX;  ///< For the last matrix.

/// An input [tokens, k] of some matrices.
struct MatrixInput {
  InputSlot slot = kNormedSlot;
  int64_t k = 0;
  std::vector<InputMatrix> matrices;
  /// Matrices of experts, which multiply only the rows of the tokens that select them.
  std::vector<InputMatrix> routed;
  /// Empty: the input passes a function that no scale commutes with.
  std::vector<InputProducer> producers;
  AwqSharing sharing;
};

/// The two inputs of an expert, or of the experts that all tokens share.
struct ExpertMatrices {
  int64_t expert =
      -1;  ///< -1: the shared ones; their gate_up is one of the layer's first matrices.
  MatrixInput gate_up;
  MatrixInput down;
};

/// The inputs of a layer's matrices, each half's in the order in which it computes them.
struct LayerInputs {
  std::vector<MatrixInput> attention;
  std::vector<MatrixInput> mlp;         ///< With experts, only the first.
  std::vector<MatrixInput> beside;      ///< Inputs of a router and an MLP next to the experts.
  std::vector<ExpertMatrices> experts;  ///< The shared ones first; empty in a dense layer.
};
LayerInputs DescribeInputs(const DecoderConfig& config, int64_t layer, const LayerTensors& tensors);
/// The norms that take factors and are stored minus 1, of all layers and before the head.
std::set<std::string> OnePlusNorms(const DecoderConfig& config);
/// The input of a head with a table of its own.
MatrixInput HeadInput(const DecoderConfig& config);

}  // namespace marlin
