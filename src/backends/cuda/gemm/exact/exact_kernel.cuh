// The exact GEMM: fp32 weights and fp32 accumulation, for all types, shapes and alignments.
//
//   C[m, n] = epilogue(sum over k of A[m, k] * W[k, n])
//
//   CTA: 32 outputs x 1, 4, 8 or 16 rows; its warps split k into parts (intra-CTA split-K)
//
//             part 0       part 1      ...          a warp takes units of 64 k: four steps, in each
//           +------------+------------+---          of which a lane has the weights of 4 outputs
//   32      | unit  unit | unit  unit |             x 4 k in registers, and four lanes split the k
//   outputs | 64 k       |            |             of an output (exact_weights.cuh)
//           +------------+------------+---
//
//   shared memory: for each warp, the activations of its unit in fp32, [rows][step][lane % 4][4 k],
//   so that a lane loads its activations of a row and step with one 16-byte load; the sums of all
//   parts, [part][row][32]; with GLU, the gates.
//
//   error: per weight, see exact_weights.cuh; sums are chains of FMAs over the k of a lane, then
//   over four lanes (two additions), then over the parts in order. That order follows from n and k
//   alone, so a row's result depends only on the row.
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/gemm/exact/exact_weights.cuh"

namespace marlin::cuda {

constexpr int kExactThreads = 32 * kMaxExactParts;

/// Loads activations k and k + 32 of rows from `first` on as floats, zeros beyond A's k; rows
/// beyond A's repeat the last one.
template <typename T, int kCount>
MARLIN_DEVICE void LoadRowsOf(const ActivationView& a, int first, int k, bool tail,
                              float (&rows)[kCount][2]) {
  const T* row = static_cast<const T*>(a.data) + min(first, a.m - 1) * a.stride + k;
  const int last = a.m - 1 - first;
  T stored[kCount][2];
  if (!tail) {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      stored[r][0] = row[0];
      stored[r][1] = row[32];
      if (r < last) row += a.stride;
    }
  } else {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      stored[r][0] = k < a.k ? row[0] : T(0.0f);
      stored[r][1] = k + 32 < a.k ? row[32] : T(0.0f);
      if (r < last) row += a.stride;
    }
  }
  // All loads are issued before the first conversion, which waits for its load.
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    rows[r][0] = static_cast<float>(stored[r][0]);
    rows[r][1] = static_cast<float>(stored[r][1]);
  }
}

template <int kCount>
MARLIN_DEVICE void LoadRows(const ActivationView& a, int first, int k, bool tail,
                            float (&rows)[kCount][2]) {
  if (a.type == Element::kF32) {
    LoadRowsOf<float>(a, first, k, tail, rows);
  } else if (a.type == Element::kBf16) {
    LoadRowsOf<__nv_bfloat16>(a, first, k, tail, rows);
  } else {
    LoadRowsOf<__half>(a, first, k, tail, rows);
  }
}

/// One warp's sums of 32 columns over a part of k.
template <typename Weights, int kRows>
class ExactPart {
 public:
  using Arguments = ExactArguments<typename Weights::View>;

  /// `rows`: this warp's shared memory for activations.
  MARLIN_DEVICE ExactPart(const Arguments& args, const ExactDecoder& decoder, float* rows)
      : args_(args), decoder_(decoder), rows_(rows), lane_(static_cast<int>(threadIdx.x) % 32) {}

  /// Stores the sums of columns `column` .. column + 31 and rows from `first_row` on over part
  /// `part` to [row][column] of `sums`. `wait` is called before activations are read.
  template <typename Wait>
  MARLIN_DEVICE void Run(int part, int column, int first_row, float* sums, const Wait& wait) {
    const int first = part * args_.split.units_of_part;
    const int last = min(first + args_.split.units_of_part, args_.split.units);
    Weights weights(args_.weights, column, lane_);
    Raw ahead;
    if (kAhead && first < last) weights.Load(first, 0, ahead);
    wait();
    float fetched[kBatch][2];
    if (kAhead && first < last) Fetch(first_row, first, fetched);
    float acc[kRows][4] = {};
    const bool simple = weights.IsSimple();
#pragma unroll 1
    for (int unit = first; unit < last; ++unit) {
      if (!kAhead) weights.Load(unit, 0, ahead);
      Stage(first_row, unit, fetched);
      if (kAhead && unit + 1 < last) Fetch(first_row, unit + 1, fetched);
      if (simple && !IsTail(unit)) {
        RunUnit<true>(weights, unit, last, ahead, acc);
      } else {
        RunUnit<false>(weights, unit, last, ahead, acc);
      }
    }
    AddLanes(acc, sums);
  }

 private:
  using Raw = typename Weights::Raw;
  /// With few rows a warp prefetches ahead of its FMAs; with more, the FMAs of other warps hide the
  /// latency, and the registers are needed for sums.
  static constexpr bool kAhead = kRows <= 4;
  static constexpr int kBatch = kRows < 8 ? kRows : 8;  ///< Rows that are fetched at a time.

  MARLIN_DEVICE bool IsTail(int unit) const { return (unit + 1) * kExactUnit > args_.a.k; }

  /// Runs the steps of a unit. Simple ones are unrolled where there are few rows.
  template <bool kSimple>
  MARLIN_DEVICE void RunUnit(Weights& weights, int unit, int last, Raw& ahead,
                             float (&acc)[kRows][4]) {
    constexpr bool kUnrolled = kSimple && kRows <= 8;
    constexpr int kSteps = Weights::kLoadSteps;
#pragma unroll(kUnrolled ? kExactSteps / kSteps : 1)
    for (int from = 0; from < kExactSteps; from += kSteps) {
      if (!kAhead && from > 0) weights.Load(unit, from, ahead);
      Raw raw = ahead;
      if (kAhead) LoadNext(weights, unit, from + kSteps, last, ahead);
      weights.template Begin<kSimple>(raw);
#pragma unroll(kUnrolled ? kSteps : 1)
      for (int step = from; step < from + kSteps; ++step) {
        float w[4][kExactStepK];
        weights.template Step<kSimple>(unit, step, raw, decoder_, w);
        if (!kSimple && IsTail(unit)) ClearTail(unit, step, w);
        Multiply(step, w, acc);
      }
    }
  }

  static MARLIN_DEVICE void LoadNext(Weights& weights, int unit, int step, int last, Raw& ahead) {
    if (step < kExactSteps) {
      weights.Load(unit, step, ahead);
    } else if (unit + 1 < last) {
      weights.Load(unit + 1, 0, ahead);
    }
  }

  MARLIN_DEVICE void Fetch(int first_row, int unit, float (&fetched)[kBatch][2]) const {
    LoadRows(args_.a, first_row, unit * kExactUnit + lane_, IsTail(unit), fetched);
  }

  /// Stores activations to this warp's shared memory: those prefetched, or else all rows, fetched
  /// now.
  MARLIN_DEVICE void Stage(int first_row, int unit, float (&fetched)[kBatch][2]) const {
    __syncwarp();
    float* low = rows_ + Weights::PlaceOf(lane_);
    float* high = rows_ + Weights::PlaceOf(lane_ + 32);
#pragma unroll
    for (int batch = 0; batch < kRows; batch += kBatch) {
      if (!kAhead) Fetch(first_row + batch, unit, fetched);
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        low[(batch + r) * kExactUnit] = fetched[r][0];
        high[(batch + r) * kExactUnit] = fetched[r][1];
      }
    }
    __syncwarp();
  }

  /// Zeroes weights beyond k, whatever scale their group has.
  MARLIN_DEVICE void ClearTail(int unit, int step, float (&w)[4][kExactStepK]) const {
#pragma unroll
    for (int i = 0; i < kExactStepK; ++i) {
      if (unit * kExactUnit + Weights::KOf(step, lane_ & 3, i) < args_.a.k) continue;
#pragma unroll
      for (int o = 0; o < 4; ++o) w[o][i] = 0.0f;
    }
  }

  MARLIN_DEVICE void Multiply(int step, const float (&w)[4][kExactStepK],
                              float (&acc)[kRows][4]) const {
    const float* from = rows_ + (step * 4 + (lane_ & 3)) * kExactStepK;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4 a = *reinterpret_cast<const float4*>(from + r * kExactUnit);
#pragma unroll
      for (int o = 0; o < 4; ++o) acc[r][o] = __fmaf_rn(a.x, w[o][0], acc[r][o]);
#pragma unroll
      for (int o = 0; o < 4; ++o) acc[r][o] = __fmaf_rn(a.y, w[o][1], acc[r][o]);
#pragma unroll
      for (int o = 0; o < 4; ++o) acc[r][o] = __fmaf_rn(a.z, w[o][2], acc[r][o]);
#pragma unroll
      for (int o = 0; o < 4; ++o) acc[r][o] = __fmaf_rn(a.w, w[o][3], acc[r][o]);
    }
  }

  /// Reduces over the four lanes that split k: each gets the sums of one of their four outputs.
  MARLIN_DEVICE void AddLanes(const float (&acc)[kRows][4], float* sums) const {
    const bool odd = (lane_ & 1) != 0;
    const bool upper = (lane_ & 2) != 0;
    const int output = (odd ? 2 : 0) + (upper ? 1 : 0);
    float* to = sums + Weights::OutputOf(lane_, output);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float mine[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float keep = odd ? acc[r][2 + i] : acc[r][i];
        const float give = odd ? acc[r][i] : acc[r][2 + i];
        mine[i] = keep + __shfl_xor_sync(0xffffffffu, give, 1);
      }
      const float keep = upper ? mine[1] : mine[0];
      const float give = upper ? mine[0] : mine[1];
      to[r * kStripOutputs] = keep + __shfl_xor_sync(0xffffffffu, give, 2);
    }
  }

  const Arguments& args_;
  const ExactDecoder& decoder_;
  float* rows_;
  int lane_;
};

/// Reduces the parts of a CTA's sums and applies the epilogue.
template <typename Weights, int kRows>
class ExactFinish {
 public:
  /// `sums`: the sums of the parts, then memory for the gates.
  MARLIN_DEVICE ExactFinish(const EpilogueView& epilogue, int m, int parts, float* sums)
      : epilogue_(epilogue), m_(m), parts_(parts), sums_(sums) {}

  /// GLU takes a pass for the gates, then one for the up columns, or two where these lie in two
  /// n-tiles of the tiled layout.
  MARLIN_DEVICE int Passes() const {
    if (!epilogue_.gated) return 1;
    return Weights::kAnyColumn || epilogue_.n / 2 % kStripOutputs == 0 ? 2 : 3;
  }
  /// The first column of a pass for the CTA's outputs from `out` on.
  MARLIN_DEVICE int ColumnOf(int pass, int out) const {
    if (pass == 0) return out;
    const int up = epilogue_.n / 2 + out;
    return Weights::kAnyColumn ? up : (up / kStripOutputs + pass - 1) * kStripOutputs;
  }

  MARLIN_DEVICE void Run(int pass, int first_row, int out) const {
    float* gates = sums_ + parts_ * kStride;
    const int outputs = epilogue_.gated ? epilogue_.n / 2 : epilogue_.n;
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kStripOutputs;
         i += static_cast<int>(blockDim.x)) {
      const int row = i / kStripOutputs;
      const int n = out + i % kStripOutputs;
      // The column within the n-tile that was summed.
      const int place = pass == 0 ? i % kStripOutputs : epilogue_.n / 2 + n - ColumnOf(pass, out);
      if (place < 0 || place >= kStripOutputs) continue;
      const float* sums = sums_ + row * kStripOutputs + place;
      float sum = sums[0];
      for (int part = 1; part < parts_; ++part) sum += sums[part * kStride];
      if (first_row + row >= m_ || n >= outputs) continue;
      if (!epilogue_.gated) {
        Finish(epilogue_, first_row + row, n, sum);
      } else if (pass == 0) {
        gates[i] = sum;
      } else {
        FinishGated(epilogue_, first_row + row, n, gates[i], sum);
      }
    }
  }

 private:
  static constexpr int kStride = kRows * kStripOutputs;  ///< From one part's sums to the next's.

  const EpilogueView& epilogue_;
  int m_;
  int parts_;
  float* sums_;
};

template <typename Weights, CodeKind kKind, int kRows>
__global__ void __launch_bounds__(kExactThreads)
    ExactGemmKernel(const __grid_constant__ ExactArguments<typename Weights::View> args) {
  extern __shared__ float4 shared_memory[];
  __shared__ float table[16];
  auto* memory = reinterpret_cast<float*>(shared_memory);
  TriggerDependentLaunch();
  if constexpr (LooksUp(kKind)) {
    if (threadIdx.x < 1 << CodeBits(kKind)) table[threadIdx.x] = args.weights.values[threadIdx.x];
    __syncthreads();
  }
  const ExactDecoder decoder = DecoderOf<kKind>(table, args.weights.values);
  const int first_row = static_cast<int>(blockIdx.x) * kRows;
  const int out = static_cast<int>(blockIdx.y) * kStripOutputs;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  float* sums = memory + warps * (kRows * kExactUnit);
  const ExactFinish<Weights, kRows> finish(args.epilogue, args.a.m, args.split.parts, sums);
  ExactPart<Weights, kRows> part(args, decoder, memory + warp * (kRows * kExactUnit));
  const int passes = finish.Passes();
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    const int column = finish.ColumnOf(pass, out);
    if (column >= args.epilogue.n) break;
#pragma unroll 1
    for (int p = warp; p < args.split.parts; p += warps) {
      // Before this only weights may be read: Prepare wrote them, no earlier kernel does.
      part.Run(p, column, first_row, sums + p * (kRows * kStripOutputs),
               [] { WaitForEarlierWork(); });
    }
    __syncthreads();
    finish.Run(pass, first_row, out);
    __syncthreads();
  }
}

/// The kernel for one kind of codes, layout and number of rows: 1, 4, 8 or 16.
template <typename Weights, CodeKind kKind>
const void* ExactKernelFor(int rows) {
  switch (rows) {
    case 1:
      return reinterpret_cast<const void*>(&ExactGemmKernel<Weights, kKind, 1>);
    case 4:
      return reinterpret_cast<const void*>(&ExactGemmKernel<Weights, kKind, 4>);
    case 8:
      return reinterpret_cast<const void*>(&ExactGemmKernel<Weights, kKind, 8>);
    default:
      return reinterpret_cast<const void*>(&ExactGemmKernel<Weights, kKind, 16>);
  }
}

template <typename Tiles>
const void* ExactKernels::Function(const Variant& variant) {
  return variant.tiled
             ? ExactKernelFor<TileWeights<Tiles::kCodes>, Tiles::kCodes>(variant.rows)
             : ExactKernelFor<CanonicalWeights<Tiles::kCodes>, Tiles::kCodes>(variant.rows);
}

}  // namespace marlin::cuda
