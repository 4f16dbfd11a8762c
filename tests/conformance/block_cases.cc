#include "block_cases.h"

#include <algorithm>
#include <initializer_list>

#include "backends/cpu/gemm/exact/exact_kernel.h"
#include "backends/cpu/gemm/gemm_job.h"
#include "plan/gemm/gemm_desc.h"

namespace marlin::conformance {
namespace {

using Blocking = cpu::GemmBlocking (*)(const GemmDesc& desc, int workers);
constexpr Blocking kDrivers[] = {&cpu::RowsBlocking, &cpu::AmxBlocking};

// Formats that cover the decoders of the vector kernels, the AMX kernel and the int8 kernels.
constexpr Format kFormats[] = {Format::kFp4E2M1, Format::kU4, Format::kInt3, Format::kS8,
                               Format::kBf16};

// Search bounds: GEMMs beyond them are too large for this program.
constexpr int64_t kMostRows = 64;
constexpr int64_t kMostColumns = int64_t{1} << 14;

GemmDesc Sized(int64_t m, int64_t n, int64_t k) {
  GemmDesc desc;
  desc.m = m;
  desc.n = n;
  desc.k = k;
  return desc;
}

struct Size {
  int64_t m;
  int64_t columns;
};

// Returns the smallest m, then the smallest n, at which one task has more columns than one epilogue
// block.
Size TaskOfSeveralRuns(Blocking blocking) {
  for (int64_t m = 1; m <= kMostRows; ++m) {
    for (int64_t columns = cpu::kStoreRun; columns <= kMostColumns; columns += cpu::kBlockRows) {
      if (blocking(Sized(m, columns, 1), kCpuThreads).columns_per_task > cpu::kStoreRun) {
        return {m, columns};
      }
    }
  }
  return {kMostRows, kMostColumns};
}

// Returns the smallest n, doubling from one block, at which tasks reach their maximum size.
Size LargestTask(Blocking blocking, int64_t m) {
  const auto task = [&](int64_t columns) {
    return blocking(Sized(m, columns, 1), kCpuThreads).columns_per_task;
  };
  int64_t columns = cpu::kBlockRows;
  while (columns < kMostColumns && task(columns) < task(kMostColumns)) columns *= 2;
  return {m, columns};
}

class Adder {
 public:
  explicit Adder(std::vector<Case>* cases) : cases_(cases) {}

  // Adds both lattices: int8 kernels are exact on one, all others on the other.
  void Add(Case c, Format format) {
    const FormatInfo& info = GetFormatInfo(format);
    c.format = format;
    c.group_size = info.quantized ? 32 : c.k;
    c.zero = format == Format::kU4 ? ZeroKind::kInteger : ZeroKind::kNone;
    c.bias_type = kTypes[seed_ % 3];
    c.a_type = kTypes[(seed_ + 1) % 3];
    c.c_type = kTypes[seed_ / 3 % 3];
    c.seed = seed_++;
    cases_->push_back(c);
    c.data = DataClass::kLatticeInt8;
    cases_->push_back(c);
  }

 private:
  static constexpr DType kTypes[] = {DType::kF32, DType::kBf16, DType::kF16};
  std::vector<Case>* cases_;
  uint64_t seed_ = 1;
};

// Adds a second MC block: A, the row weights and the output are accessed from its first row on. Odd
// n puts the second half of a GLU inside a block.
void AddSecondPass(Blocking blocking, Adder* adder) {
  constexpr int64_t kK = 48;
  constexpr int64_t kRowsBeyond = 19;
  for (const bool gated : {false, true}) {
    Case c;
    c.k = kK;
    c.n = gated ? 42 : 21;
    c.m = blocking(Sized(kMostColumns, c.n, kK), kCpuThreads).rows_per_pass + kRowsBeyond;
    c.gated = gated;
    c.bias = true;
    c.row_weight = true;
    for (const Format format : kFormats) adder->Add(c, format);
  }
}

// Tasks with several epilogue blocks: biases, gates and outputs beyond the first block.
void AddSeveralRuns(Blocking blocking, Adder* adder) {
  const Size size = TaskOfSeveralRuns(blocking);
  for (const bool gated : {false, true}) {
    Case c;
    c.m = size.m;
    c.k = 48;
    const int64_t columns = size.columns + 5;
    c.n = gated ? 2 * columns : columns;
    c.gated = gated;
    c.bias = true;
    c.row_weight = true;
    c.activation = gated ? Activation::kRelu : Activation::kNone;
    for (const Format format : kFormats) adder->Add(c, format);
  }
}

void AddLargestTasks(Blocking blocking, Adder* adder) {
  const Size size = LargestTask(blocking, TaskOfSeveralRuns(blocking).m);
  Case c;
  c.m = size.m;
  c.n = size.columns + 7;
  c.k = 16;
  c.bias = true;
  adder->Add(c, Format::kFp4E2M1);
}

// Adds a second KC block for the exact kernels. fp32 is among the formats because AMX leaves those
// weights to the vector kernel.
void AddSecondPassOverK(std::vector<Case>* cases) {
  uint64_t seed = 1;
  for (const Format format : {Format::kFp32, Format::kFp4E2M1, Format::kS8}) {
    for (const int64_t m : {1, 6}) {
      Case c;
      c.format = format;
      c.m = m;
      c.n = 18;
      c.k = cpu::kPassK + 76;
      c.group_size = GetFormatInfo(format).quantized ? 32 : c.k;
      c.data = DataClass::kGaussian;
      c.bias = seed % 2 == 0;
      c.seed = seed++;
      cases->push_back(c);
    }
  }
}

}  // namespace

void AddBlockEdges(std::vector<Case>* cases) {
  AddSecondPassOverK(cases);
  Adder adder(cases);
  for (const Blocking blocking : kDrivers) {
    AddSecondPass(blocking, &adder);
    AddSeveralRuns(blocking, &adder);
    AddLargestTasks(blocking, &adder);
  }
}

}  // namespace marlin::conformance
