// What attention needs of a step's projections, in one pass: norms of queries and keys, RoPE, and
// the append of keys and values to the paged KV cache.
//
//   A warp has one head of one row: its features go through shared memory, because RoPE pairs
//   features of different lanes. Heads are numbered: queries, then keys, then values.
#include "backends/cuda/kernels/common/epilogue.cuh"
#include "backends/cuda/kernels/common/chain.cuh"
#include "backends/cuda/kernels/decoder/decoder_launch.h"
#include "backends/cuda/kernels/decoder/pages.cuh"
#include "backends/cuda/kernels/decoder/rotation.cuh"

namespace marlin::cuda {
namespace {

constexpr int kWarps = 4;

/// A value as a store to `type` rounds it.
MARLIN_DEVICE float Rounded(float value, Element type) {
  if (type == Element::kBf16) return __bfloat162float(__float2bfloat16_rn(value));
  return type == Element::kF16 ? __half2float(__float2half_rn(value)) : value;
}

/// One head of one row in a warp.
class HeadWarp {
 public:
  MARLIN_DEVICE HeadWarp(const RotateAppendArguments& args, int row, float* features)
      : args_(args), row_(row), lane_(static_cast<int>(threadIdx.x) & 31), features_(features) {}

  MARLIN_DEVICE void RunQuery(int head) const {
    const int64_t at = args_.queries.At(static_cast<int64_t>(row_) * args_.heads + head);
    Prepare(args_.queries, at, args_.query_norm, args_.query_norm_type);
    for (int i = lane_; i < args_.pages.key_dim; i += 32) {
      StoreFloat(args_.queries.data, args_.queries.type, at + i, features_[i]);
    }
  }

  MARLIN_DEVICE void RunKey(int head) const {
    uint8_t* const page = Page();
    const int64_t at = args_.keys.At(static_cast<int64_t>(row_) * args_.pages.kv_heads + head);
    Prepare(args_.keys, at, args_.key_norm, args_.key_norm_type);
    if (page == nullptr) return;
    const int64_t to = Place(head) * args_.pages.key_dim;
    for (int i = lane_; i < args_.pages.key_dim; i += 32) {
      StoreFloat(page, args_.pages.type, to + i, features_[i]);
    }
  }

  MARLIN_DEVICE void RunValue(int head) const {
    uint8_t* const page = Page();
    if (page == nullptr) return;
    const int64_t at = args_.values.At(static_cast<int64_t>(row_) * args_.pages.kv_heads + head);
    const int64_t to = KeyElements(args_.pages) + Place(head) * args_.pages.value_dim;
    for (int i = lane_; i < args_.pages.value_dim; i += 32) {
      StoreFloat(page, args_.pages.type, to + i, LoadFloat(args_.values.data, args_.values.type, at + i));
    }
  }

 private:
  MARLIN_DEVICE int Position() const { return args_.sequences.positions[row_]; }

  MARLIN_DEVICE int64_t Place(int head) const {
    return static_cast<int64_t>(head) * args_.pages.page_tokens + Position() % args_.pages.page_tokens;
  }

  /// The page of the row's position. Null, with a record of why, if there is none.
  MARLIN_DEVICE uint8_t* Page() const {
    const int sequence = SequenceOf(args_.sequences, row_);
    if (!CheckPosition(args_.sequences, sequence, row_, args_.errors)) return nullptr;
    return FindPage(args_.sequences, args_.pages, sequence, Position(), args_.errors);
  }

  /// Loads a head's features, normalizes and rotates them, with the roundings of the operations
  /// that do so in place.
  MARLIN_DEVICE void Prepare(const RowsView& from, int64_t at, const void* norm,
                             Element norm_type) const {
    const int columns = args_.pages.key_dim;
    double squares = 0;
    for (int i = lane_; i < columns; i += 32) {
      const float value = LoadFloat(from.data, from.type, at + i);
      features_[i] = value;
      squares += static_cast<double>(value) * value;
    }
    if (norm != nullptr) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
      const double mean = squares / columns;
      const auto factor =
          static_cast<float>(1.0 / sqrt(mean + static_cast<double>(args_.epsilon)));
      for (int i = lane_; i < columns; i += 32) {
        const float weight = LoadFloat(norm, norm_type, i);
        features_[i] = Rounded(features_[i] * factor * weight, from.type);
      }
    }
    __syncwarp();
    const int64_t position = Position();
    if (position < 0) {
      if (lane_ == 0) RecordError(args_.errors, ValueError::kPosition, position, row_);
      return;
    }
    for (int pair = lane_; pair < args_.pairs; pair += 32) {
      float cosine;
      float sine;
      RotationOf(args_.frequencies[pair], position, args_.factor, &cosine, &sine);
      const int first = args_.interleaved ? 2 * pair : pair;
      const int second = args_.interleaved ? 2 * pair + 1 : pair + args_.pairs;
      const float a = features_[first];
      const float b = features_[second];
      features_[first] = Rounded(a * cosine - b * sine, from.type);
      features_[second] = Rounded(b * cosine + a * sine, from.type);
    }
    __syncwarp();
  }

  const RotateAppendArguments& args_;
  int row_;
  int lane_;
  float* features_;
};

__global__ void __launch_bounds__(kWarps * 32, 8)
    RotateAppendKernel(const __grid_constant__ RotateAppendArguments args) {
  extern __shared__ float features[];
  EnterChain();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int head = static_cast<int>(blockIdx.y) * kWarps + warp;
  const auto row = static_cast<int>(blockIdx.x);
  if (row == 0 && blockIdx.y == 0) CheckFirstRows(args.sequences, args.errors);
  const int kv_heads = args.pages.kv_heads;
  const HeadWarp mine(args, row, features + warp * args.pages.key_dim);
  if (head < args.heads) {
    mine.RunQuery(head);
  } else if (head < args.heads + kv_heads) {
    mine.RunKey(head - args.heads);
  } else if (head < args.heads + 2 * kv_heads) {
    mine.RunValue(head - args.heads - kv_heads);
  }
}

}  // namespace

cudaError_t LoadRotateAppend() {
  return PreferShared(reinterpret_cast<const void*>(&RotateAppendKernel));
}

cudaError_t LaunchRotateAppend(const RotateAppendArguments& args, cudaStream_t stream) {
  const int warps = args.heads + 2 * args.pages.kv_heads;
  const dim3 grid(static_cast<unsigned>(args.sequences.rows),
                  static_cast<unsigned>((warps + kWarps - 1) / kWarps));
  const int bytes = kWarps * args.pages.key_dim * int{sizeof(float)};
  return LaunchInChain(&RotateAppendKernel, grid, kWarps * 32, bytes, stream, args);
}

}  // namespace marlin::cuda
