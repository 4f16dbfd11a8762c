// RMS norm of many rows: what VectorNormKernel (norm_kernels.cu) does, with the same bits.
//
//   A warp has a row and requests all of it at once; nothing waits for another warp. Lane l has the
//   quads l, l + 32, ... of the columns. VectorNormKernel adds squares within its 16 warps, then
//   their sums: warp w of it has the quads 32 w to 32 w + 31, and those 2,048 columns further, so
//   that what it adds are the lanes' quads w and w + 16.
#include "backends/cuda/attention/head_math.cuh"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/warp_sums.cuh"
#include "backends/cuda/rows/norm_launch.h"
#include "backends/cuda/rows/typed.cuh"

namespace marlin::cuda {
namespace {

constexpr int kWarps = 4;
/// Warps of VectorNormKernel.
constexpr int kSums = 16;

/// CTAs of a multiprocessor that have registers for rows.
constexpr int ResidentFor(int quads) { return quads <= 8 ? 5 : quads <= 16 ? 4 : 64 / quads; }

MARLIN_DEVICE double Squares(const float4& v) {
  const double a = v.x;
  const double b = v.y;
  const double c = v.z;
  const double d = v.w;
  return __fma_rn(a, a, b * b) + __fma_rn(c, c, d * d);
}

/// The quads of a lane in a row; zeros beyond it.
template <int kQuads>
struct LaneRow {
  /// Quads of another row that fit registers, too.
  static constexpr int kPart = kQuads == 16 ? 8 : 4;
  using Part = float4[kPart];

  int lane;
  int quads;  ///< In the row.
  float4 of[kQuads] = {};

  MARLIN_DEVICE bool Has(int i) const { return lane + 32 * i < quads; }

  MARLIN_DEVICE void Load(const float4* row) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      if (Has(i)) of[i] = __ldcg(row + lane + 32 * i);
    }
  }

  /// A row that is not read again: the L2 cache keeps others.
  MARLIN_DEVICE void Add(const float4* row) {
#pragma unroll
    for (int from = 0; from < kQuads; from += kPart) {
      Part added = {};
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        if (Has(from + i)) added[i] = __ldcs(row + lane + 32 * (from + i));
      }
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        float4& v = of[from + i];
        v = {v.x + added[i].x, v.y + added[i].y, v.z + added[i].z, v.w + added[i].w};
      }
    }
  }

  MARLIN_DEVICE double SumOfSquares() const {
    constexpr int kCount = kQuads < kSums ? kQuads : kSums;
    return SumOfAll<kCount>([&](int w) {
      const double squares = Squares(of[w]);
      return w + kSums < kQuads ? squares + Squares(of[w + kSums]) : squares;
    });
  }

  MARLIN_DEVICE void LoadPart(const float4* row, int from, Part& part) const {
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      if (Has(from + i)) part[i] = row[lane + 32 * (from + i)];
    }
  }

  MARLIN_DEVICE void StorePart(void* data, Element type, int64_t at, int from) const {
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      if (Has(from + i)) StoreFour(data, type, at + 4 * (lane + 32 * (from + i)), of[from + i]);
    }
  }

  MARLIN_DEVICE void Store(float* row) const {
#pragma unroll
    for (int from = 0; from < kQuads; from += kPart) StorePart(row, Element::kF32, 0, from);
  }

  /// Stores the row times a factor and weights, of which `part` are the first. The next part is
  /// requested before one is stored.
  MARLIN_DEVICE void StoreProducts(float factor, const float4* weights, Part& part, void* data,
                                   Element type, int64_t at) {
#pragma unroll
    for (int from = 0; from < kQuads; from += kPart) {
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        const float4& w = part[i];
        float4& v = of[from + i];
        v = {v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w};
      }
      if (from + kPart < kQuads) LoadPart(weights, from + kPart, part);
      StorePart(data, type, at, from);
    }
  }
};

/// A row of floats, of views of rank 2.
MARLIN_DEVICE float* RowAt(const RowsView& rows, int64_t row) {
  return static_cast<float*>(rows.data) + row * rows.stride;
}
MARLIN_DEVICE const float4* QuadsOf(const float* row) {
  return reinterpret_cast<const float4*>(row);
}

/// Rows of up to 128 kQuads columns.
template <int kQuads, bool kAdds>
__global__ void __launch_bounds__(kWarps * 32, ResidentFor(kQuads))
    NormRowsKernel(const __grid_constant__ RmsNormArguments args) {
  EnterChain();
  const auto row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= args.x.rows) return;
  LaneRow<kQuads> x = {static_cast<int>(threadIdx.x) & 31, args.columns / 4};
  float* const of_x = RowAt(args.x, row);
  x.Load(QuadsOf(of_x));
  if constexpr (kAdds) {
    x.Add(QuadsOf(RowAt(args.block, row)));
    x.Store(of_x);
  }
  const auto* const weights = static_cast<const float4*>(args.weight);
  typename LaneRow<kQuads>::Part part = {};
  x.LoadPart(weights, 0, part);
  const float factor = RmsFactor(x.SumOfSquares() / args.columns, args.epsilon);
  // One branch for all stores.
  const auto store = [&](Element type) {
    x.StoreProducts(factor, weights, part, args.out.data, type, row * args.out.stride);
  };
  if (args.out.type == Element::kF32) return store(Element::kF32);
  if (args.out.type == Element::kBf16) return store(Element::kBf16);
  store(Element::kF16);
}

constexpr int kLeastColumns = 512;
constexpr int kMostColumns = 4096;

template <bool kAdds>
auto* KernelFor(int columns) {
  if (columns <= 1024) return &NormRowsKernel<8, kAdds>;
  if (columns <= 2048) return &NormRowsKernel<16, kAdds>;
  return columns <= 3072 ? &NormRowsKernel<24, kAdds> : &NormRowsKernel<32, kAdds>;
}

/// Whether rows of a view begin at multiples of `bytes`.
bool RowsAreAligned(const RowsView& view, int64_t bytes) {
  const int64_t element = view.type == Element::kF32 ? 4 : 2;
  return reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) == 0 &&
         view.stride * element % bytes == 0;
}

}  // namespace

bool HasVectorRows(const RmsNormArguments& args) {
  const bool f32 = args.x.type == Element::kF32 && args.weight_type == Element::kF32 &&
                   (!args.adds() || args.block.type == Element::kF32);
  const int64_t out_bytes = args.out.type == Element::kF32 ? 16 : 8;
  return f32 && args.x.inner == 1 && args.columns % 4 == 0 && RowsAreAligned(args.x, 16) &&
         RowsAreAligned(args.block, 16) && RowsAreAligned(args.out, out_bytes) &&
         reinterpret_cast<uintptr_t>(args.weight) % 16 == 0;
}

cudaError_t LoadNormRows() {
  return PrepareKernels(&NormRowsKernel<8, false>, &NormRowsKernel<8, true>,
                        &NormRowsKernel<16, false>, &NormRowsKernel<16, true>,
                        &NormRowsKernel<24, false>, &NormRowsKernel<24, true>,
                        &NormRowsKernel<32, false>, &NormRowsKernel<32, true>);
}

bool TakesNormRows(const RmsNormArguments& args) {
  return args.columns > kLeastColumns && args.columns <= kMostColumns && HasVectorRows(args) &&
         args.block.inner == 1 && args.out.inner == 1;
}

cudaError_t LaunchNormRows(const RmsNormArguments& args, cudaStream_t stream) {
  const auto kernel = args.adds() ? KernelFor<true>(args.columns) : KernelFor<false>(args.columns);
  const dim3 blocks(static_cast<unsigned>((args.x.rows + kWarps - 1) / kWarps));
  return LaunchInChain(kernel, blocks, kWarps * 32, 0, stream, args);
}

}  // namespace marlin::cuda
