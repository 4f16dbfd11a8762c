#include "plan/moe/experts.h"

namespace marlin {

GemmDesc DescribeExpert(const ExpertsProblem& problem, const ExpertOperand& matrix, int64_t rows,
                        DType a_type) {
  GemmDesc desc = DescribeWeights(*matrix.weights);
  desc.m = rows;
  desc.a_type = a_type;
  desc.c_type = DType::kF32;
  desc.allow_bf16_activations = problem.allow_bf16_activations;
  desc.accuracy = problem.accuracy;
  desc.determinism = problem.determinism;
  return desc;
}

}  // namespace marlin
