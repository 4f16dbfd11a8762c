// Prepared weights of the CPU backend: the panels of all experts in one allocation.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "backends/cpu/pack/pack_columns.h"
#include "backends/cpu/pack/panels.h"
#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "plan/gemm/backend.h"

namespace marlin::cpu {

class PreparedPanels : public PreparedWeights::Storage {
 public:
  /// Packs columns of weights that can be joined. Unquantized weights may be transposed. All other
  /// validation has been done; unquantized values are checked here unless `validated`. Errors:
  /// kNonFiniteInput (a weight is NaN or Inf), kOutOfMemory.
  static Result<std::shared_ptr<const PreparedPanels>> Make(std::span<const WeightColumns> columns,
                                                            bool validated, const Backend* backend,
                                                            ThreadPool& pool);
  /// Panels in the memory of an image, which they keep alive. Errors: kMalformedFile (wrong size).
  static Result<std::shared_ptr<const PreparedPanels>> FromImage(const PreparedImage& image,
                                                                 const Backend* backend);
  /// The whole allocation: panels, value table and global scales.
  std::span<const std::byte> image() const {
    return {reinterpret_cast<const std::byte*>(base_), static_cast<size_t>(image_bytes_)};
  }
  PanelView View(int64_t expert) const;

 private:
  /// Computes the offsets and strides of all arrays.
  void LayOut();
  /// Packs some blocks. Returns false if `check` is set and a weight is not finite.
  bool PackBlocks(const BlockColumns& columns, int64_t expert, int64_t first_block,
                  bool check) const;

  PanelView layout_{};                 ///< The view of an expert, without its pointers.
  const uint8_t* base_ = nullptr;      ///< 64-byte aligned.
  AlignedBuffer buffer_;               ///< Owns base_ after Make.
  std::shared_ptr<const void> owner_;  ///< Owns base_ after FromImage.
  int64_t codes_stride_ = 0;           ///< Bytes from one expert to the next.
  int64_t scales_stride_ = 0;
  int64_t zeros_stride_ = 0;
  int64_t biases_stride_ = 0;
  int64_t super_scales_stride_ = 0;
  int64_t super_biases_stride_ = 0;
  int64_t scales_offset_ = 0;
  int64_t zeros_offset_ = 0;
  int64_t biases_offset_ = 0;
  int64_t super_scales_offset_ = 0;
  int64_t super_biases_offset_ = 0;
  int64_t table_offset_ = 0;    ///< f32 [256].
  int64_t globals_offset_ = 0;  ///< f32 [experts].
  int64_t image_bytes_ = 0;
};

}  // namespace marlin::cpu
