#include "backends/cpu/gemm/gemm_driver.h"

#include <algorithm>

#include "backends/cpu/gemm/bf16/bf16_kernel.h"
#include "backends/cpu/gemm/gemv_kernel.h"
#include "backends/cpu/gemm/kernel_table.h"
#include "backends/cpu/gemm/sparse/sparse_kernel.h"
#include "base/checked.h"
#include "base/scalars.h"

namespace marlin::cpu {

bool NeedsTwoTerms(const GemmDesc& desc) {
  return desc.a_type != DType::kBf16 && !desc.allow_bf16_activations;
}

const ExactKernels& ExactKernelsOf(Isa level) {
  switch (level) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return avx2::kExactKernels;
    case Isa::kAvx512:
    case Isa::kAmx:
      return avx512::kExactKernels;
#endif
#if defined(__aarch64__)
    case Isa::kNeon:
      return neon::kExactKernels;
#endif
    default:
      return scalar::kExactKernels;
  }
}

RowKernels ExactRowKernels(Isa level) {
  const ExactKernels& kernels = ExactKernelsOf(level);
  const auto pack_row = [](const ExactKernels& vector, const void* a, DType type, int64_t k,
                           void* row) { vector.pack_row(a, type, k, static_cast<float*>(row)); };
  RowKernels rows{&kernels, kSliceK * sizeof(float), pack_row, kernels.select};
  if (level == Isa::kAvx2) rows.block_bytes = int64_t{4} << 20;
  return rows;
}

#if defined(__x86_64__)
RowKernels Bf16RowKernels(const GemmDesc& desc) {
  const ExactKernels* vector = &ExactKernelsOf(Isa::kAvx512);
  if (NeedsTwoTerms(desc)) {
    const auto pack_row = [](const ExactKernels&, const void* a, DType type, int64_t k, void* row) {
      avx512bf16::PackTwoTerms(a, type, k, row);
    };
    return {vector, 2 * avx512bf16::kTermSliceBytes, pack_row, &avx512bf16::SelectTwoTerms};
  }
  const auto pack_row = [](const ExactKernels&, const void* a, DType type, int64_t k, void* row) {
    avx512bf16::PackOneTerm(a, type, k, row);
  };
  return {vector, avx512bf16::kTermSliceBytes, pack_row, &avx512bf16::SelectOneTerm};
}

RowKernels SparseRowKernels() {
  const auto pack_row = [](const ExactKernels&, const void* a, DType type, int64_t k, void* row) {
    avx512bf16::PackSparseRow(a, type, k, row);
  };
  return {&ExactKernelsOf(Isa::kAvx512), avx512bf16::kTermSliceBytes, pack_row,
          &avx512bf16::SelectSparse};
}

RowKernels SparseAvx2RowKernels() {
  RowKernels rows = ExactRowKernels(Isa::kAvx2);
  rows.pack_row = [](const ExactKernels& vector, const void* a, DType type, int64_t k, void* row) {
    auto* const x = static_cast<float*>(row);
    vector.pack_row(a, type, k, x);
    avx2::ReorderSparseRow(RoundUp(k, kChunkK), x);
  };
  rows.select = &avx2::SelectSparse;
  return rows;
}

RowKernels GemvRowKernels() {
  const auto pack_row = [](const ExactKernels& vector, const void* a, DType type, int64_t k,
                           void* row) {
    auto* const x = static_cast<float*>(row);
    vector.pack_row(a, type, k, x);
    avx2::ReorderGemvRow(RoundUp(k, kChunkK), x);
  };
  return {&ExactKernelsOf(Isa::kAvx2), kSliceK * sizeof(float), pack_row, &avx2::SelectGemv};
}
#else
// Never planned: this architecture has neither level.
RowKernels Bf16RowKernels(const GemmDesc& /*desc*/) { return ExactRowKernels(Isa::kScalar); }
RowKernels GemvRowKernels() { return ExactRowKernels(Isa::kScalar); }
RowKernels SparseRowKernels() { return ExactRowKernels(Isa::kScalar); }
RowKernels SparseAvx2RowKernels() { return ExactRowKernels(Isa::kScalar); }
#endif

RowKernels RowKernelsOf(const KernelDesc& kernel, const GemmDesc& desc) {
  if (IsGemv(kernel)) return GemvRowKernels();
  if (IsSparseGemv(kernel)) return SparseRowKernels();
  if (IsSparseGemm(kernel)) return SparseAvx2RowKernels();
  switch (kernel.grade) {
    case Grade::kW4A8:
      return W4a8RowKernels(kernel.level);
    case Grade::kBf16Compute:
      return Bf16RowKernels(desc);
    case Grade::kExact:
      break;
  }
  return ExactRowKernels(kernel.level);
}

TaskGrid TaskGrid::Of(const GemmDesc& desc, int64_t blocks_per_task) {
  TaskGrid grid;
  grid.columns = desc.gated ? desc.n / 2 : desc.n;
  grid.columns_per_task = blocks_per_task * kBlockRows;
  grid.tasks = CeilDivide(grid.columns, grid.columns_per_task);
  return grid;
}

ColumnRange TaskGrid::Columns(int64_t task) const {
  return {task * columns_per_task, std::min(columns, (task + 1) * columns_per_task)};
}

const float* WidenBias(const GemmCall& call, float* target) {
  const Epilogue& epilogue = call.epilogue;
  if (epilogue.bias == nullptr) return nullptr;
  if (epilogue.bias_type == DType::kF32) return static_cast<const float*>(epilogue.bias);
  const auto* const bias = static_cast<const uint16_t*>(epilogue.bias);
  for (int64_t i = 0; i < call.desc.n; ++i) {
    target[i] = epilogue.bias_type == DType::kF16 ? HalfToFloat(bias[i]) : Bf16ToFloat(bias[i]);
  }
  return target;
}

void StoreRows(const GemmCall& call, const ExactKernels& kernels, const float* bias,
               ColumnRange columns, const FinishedSums& sums) {
  const int64_t half = call.desc.n / 2;
  const int64_t size = DTypeBytes(call.desc.c_type);
  EpilogueRow row{};
  row.activation = call.desc.activation;
  row.count = columns.last - columns.first;
  row.bias = bias == nullptr ? nullptr : bias + columns.first;
  row.up_bias = (bias == nullptr || sums.up == nullptr) ? nullptr : bias + half + columns.first;
  for (int64_t i = 0; i < call.desc.m; ++i) {
    row.sums = sums.gate + i * sums.stride;
    row.up = sums.up == nullptr ? nullptr : sums.up + i * sums.stride;
    row.row_weight = call.epilogue.row_weight == nullptr ? nullptr : call.epilogue.row_weight + i;
    uint8_t* target = static_cast<uint8_t*>(call.c) + (i * call.c_stride + columns.first) * size;
    kernels.store_row(row, target, call.desc.c_type);
  }
}

}  // namespace marlin::cpu
