#include "plan/experts.h"

namespace marlin {

GemmDesc DescribeExpert(const ExpertsProblem& problem, const ExpertOperand& matrix, int64_t rows,
                        DType a_type) {
  const WeightsSpec& spec = matrix.weights->spec;
  GemmDesc desc;
  desc.m = rows;
  desc.n = spec.n;
  desc.k = spec.k;
  desc.format = spec.format;
  desc.group_size = spec.group_size;
  desc.scale_type = spec.scale_type;
  desc.a_type = a_type;
  desc.c_type = DType::kF32;
  desc.has_zeros = spec.has_zeros;
  desc.has_biases = spec.has_biases;
  desc.allow_bf16_activations = problem.allow_bf16_activations;
  desc.accuracy = problem.accuracy;
  desc.determinism = problem.determinism;
  desc.weights = matrix.weights->traits;
  return desc;
}

}  // namespace marlin
