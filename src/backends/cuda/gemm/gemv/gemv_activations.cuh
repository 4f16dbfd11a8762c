// Activations of the GEMV kernel: this CTA's columns of all rows are copied to shared memory once,
// in pieces along k, each with an mbarrier, so that MMAs begin when the first has arrived.
//
//   rows of whole 16 bytes   TMA bulk copies, one per row and piece, spread over the warps; two
//                            adjacent CTAs may be a multicast group: each copies half of the rows'
//                            pieces to both
//   else                     cp.async of 16 bytes by all threads
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/gemm/gemv/gemv_layout.h"

namespace marlin::cuda {

/// Copies 8 numbers of a row of A; those beyond k become zero.
MARLIN_DEVICE void CopyEight(const GemvArguments& args, int m, int k, uint32_t to) {
  const int bytes = min(max(args.k - k, 0), 8) * 2;
  // The address stays in range even where nothing is read.
  const uint8_t* from =
      static_cast<const uint8_t*>(args.a) + (m * args.a_stride + (bytes > 0 ? k : 0)) * 2;
  CopyAsync16(to, from, bytes);
}

/// The row with which this CTA's copies of activations begin. CTAs begin with different rows,
/// because all of them read the same data at the same time; a multicast group begins with one.
MARLIN_DEVICE int FirstRow(const GemvArguments& args) {
  return static_cast<int>(blockIdx.y >> (args.multicast - 1)) & args.row_mask;
}

/// Called by one thread before copies begin: the mbarrier of a piece expects the bytes that the
/// multicast group copies to this CTA.
MARLIN_DEVICE void ExpectActivations(const GemvArguments& args, int first_k, uint32_t barrier,
                                     int piece) {
  const int piece_k = kTileK << args.piece_log2;
  const int left = min(args.k - first_k, args.tiles_of_split * kTileK) - piece * piece_k;
  ArriveExpecting(barrier, max(min(left, piece_k), 0) * 2 * args.m);
}

/// Writes zeros beyond k, which bulk copies leave out.
MARLIN_DEVICE void ClearBehindK(const GemvArguments& args, int first_k, uint32_t to) {
  const int end = args.tiles_of_split * kTileK;
  const int begin = min(max(args.k - first_k, 0), end);
  for (int i = begin + static_cast<int>(threadIdx.x) * 8; i < end;
       i += static_cast<int>(blockDim.x) * 8) {
    for (int m = 0; m < args.m; ++m) {
      asm volatile(
          "st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to + m * args.row_bytes + i * 2), "r"(0)
          : "memory");
    }
  }
}

/// The bulk copies that one thread of every warp issues: this split's columns of all rows of A, one
/// copy per row and piece; in a multicast group this CTA issues its share of them to all.
/// Constructed before earlier work has ended, so that nothing is left to compute then.
struct RowCopies {
  const GemvArguments& args;
  uint32_t to;
  uint32_t barriers;
  int columns;  ///< This split's.
  int first_k;
  int first_row;
  int row;
  int piece;

  MARLIN_DEVICE RowCopies(const GemvArguments& arguments, int first, uint32_t activations,
                          uint32_t arrived, int warp)
      : args(arguments), to(activations), barriers(arrived), first_k(first) {
    columns = min(args.k - first_k, args.tiles_of_split * kTileK);
    first_row = FirstRow(args);
    const int copy = args.multicast == 1 ? warp : warp * 2 + static_cast<int>(blockIdx.y & 1);
    piece = copy * args.piece_factor >> 16;
    row = copy - piece * args.m;
  }

  MARLIN_DEVICE void Run() {
    const int piece_k = kTileK << args.piece_log2;
    while (piece < args.pieces && piece * piece_k < columns) {
      const int k = piece * piece_k;
      const int bytes = min(columns - k, piece_k) * 2;
      int m = row + first_row;
      if (m >= args.m) m -= args.m;
      const uint8_t* from =
          static_cast<const uint8_t*>(args.a) + (m * args.a_stride + first_k + k) * 2;
      const uint32_t at = to + m * args.row_bytes + k * 2;
      const uint32_t barrier = barriers + 8 * piece;
      if (args.multicast == 1) {
        CopyBulk(at, from, bytes, barrier);
      } else {
        // CTAs are [multicast][splits] in the cluster if the splits exchange sums,
        // otherwise [multicast].
        const uint32_t blocks = args.in_cluster ? (1u | 1u << args.splits) << blockIdx.x : 3u;
        CopyBulkToCluster(at, from, bytes, barrier, blocks);
      }
      piece += args.step_pieces;
      row += args.step_rows;
      if (row >= args.m) {
        row -= args.m;
        ++piece;
      }
    }
  }
};

/// Copies this split's columns of all rows of A, piece by piece, so that MMAs can begin when the
/// first has arrived. All threads arrive at the mbarrier of every piece.
MARLIN_DEVICE void CopyActivations(const GemvArguments& args, int first_k, uint32_t to,
                                   uint32_t barriers) {
  constexpr int kChunksPerTileLog2 = 4;  // 8 numbers each.
  const int chunks_log2 = args.piece_log2 + kChunksPerTileLog2;
  const int total = args.tiles_of_split << kChunksPerTileLog2;
  const int first_row = FirstRow(args);
  for (int piece = 0; piece < args.pieces; ++piece) {
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < args.m << chunks_log2;
         i += static_cast<int>(blockDim.x)) {
      const int chunk = (piece << chunks_log2) + (i & ((1 << chunks_log2) - 1));
      if (chunk >= total) continue;
      int m = (i >> chunks_log2) + first_row;
      if (m >= args.m) m -= args.m;
      CopyEight(args, m, first_k + chunk * 8, to + m * args.row_bytes + chunk * 16);
    }
    ArriveWithCopies(barriers + 8 * piece);
  }
}

}  // namespace marlin::cuda
