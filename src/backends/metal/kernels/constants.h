// The function constants of all kernels. Pipelines are specialised for their values, so unused
// features cost nothing.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_CONSTANTS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_CONSTANTS_H_

#include "backends/metal/kernels/parameters.h"

namespace marlin {
namespace kernels {

constant int code_kind [[function_constant(MARLIN_CONSTANT_CODE_KIND)]];
constant int code_bits [[function_constant(MARLIN_CONSTANT_CODE_BITS)]];
constant int scale_type [[function_constant(MARLIN_CONSTANT_SCALE_TYPE)]];
constant int group_extra [[function_constant(MARLIN_CONSTANT_GROUP_EXTRA)]];
constant int group_span [[function_constant(MARLIN_CONSTANT_GROUP_SPAN)]];
constant int input_type [[function_constant(MARLIN_CONSTANT_INPUT_TYPE)]];
constant int aligned_input [[function_constant(MARLIN_CONSTANT_ALIGNED_INPUT)]];
constant int output_type [[function_constant(MARLIN_CONSTANT_OUTPUT_TYPE)]];
constant int partial [[function_constant(MARLIN_CONSTANT_PARTIAL)]];
constant int bias_type [[function_constant(MARLIN_CONSTANT_BIAS_TYPE)]];
constant int has_bias [[function_constant(MARLIN_CONSTANT_HAS_BIAS)]];
constant int activation [[function_constant(MARLIN_CONSTANT_ACTIVATION)]];
constant int has_row_weight [[function_constant(MARLIN_CONSTANT_HAS_ROW_WEIGHT)]];
constant int gated [[function_constant(MARLIN_CONSTANT_GATED)]];
constant int gathered [[function_constant(MARLIN_CONSTANT_GATHERED)]];
constant int gate_limited [[function_constant(MARLIN_CONSTANT_GATE_LIMITED)]];
constant int extra_type [[function_constant(MARLIN_CONSTANT_EXTRA_TYPE)]];
constant int global_divides [[function_constant(MARLIN_CONSTANT_GLOBAL_DIVIDES)]];
constant int key_type [[function_constant(MARLIN_CONSTANT_KEY_TYPE)]];
constant int value_type [[function_constant(MARLIN_CONSTANT_VALUE_TYPE)]];
constant int paged_keys [[function_constant(MARLIN_CONSTANT_PAGED_KEYS)]];
constant int aligned_keys [[function_constant(MARLIN_CONSTANT_ALIGNED_KEYS)]];
constant int group_log2 [[function_constant(MARLIN_CONSTANT_GROUP_LOG2)]];
constant int whole_k [[function_constant(MARLIN_CONSTANT_WHOLE_K)]];
constant int whole_m [[function_constant(MARLIN_CONSTANT_WHOLE_M)]];
constant int integer_zeros [[function_constant(MARLIN_CONSTANT_INTEGER_ZEROS)]];

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_CONSTANTS_H_
