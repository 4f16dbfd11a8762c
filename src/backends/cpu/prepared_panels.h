// Prepared weights of the CPU backend: panels of every expert in one allocation.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "backends/cpu/pack_columns.h"
#include "backends/cpu/panels.h"
#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "plan/backend.h"

namespace marlin::cpu {

class PreparedPanels : public PreparedWeights::Storage {
 public:
  /// Rearranges columns of weights that can be joined. Codes of unquantized formats may lie
  /// transposed, and their values are checked unless they have been validated, as all else has.
  /// Errors: kNonFiniteInput for
  /// numbers that are NaN or Inf, kOutOfMemory.
  static Result<std::shared_ptr<const PreparedPanels>> Make(std::span<const WeightColumns> columns,
                                                            bool validated, const Backend* backend,
                                                            ThreadPool& pool);
  /// Panels that lie in an image, which they keep. Errors: kMalformedFile for another size.
  static Result<std::shared_ptr<const PreparedPanels>> FromImage(const PreparedImage& image,
                                                                 const Backend* backend);
  /// All of it: the panels, the table and the global scales.
  std::span<const std::byte> image() const {
    return {reinterpret_cast<const std::byte*>(base_), static_cast<size_t>(image_bytes_)};
  }
  PanelView View(int64_t expert) const;

 private:
  /// Chooses the places of all arrays.
  void LayOut();
  /// Fills the panels of some blocks. False when `check` finds a number that is not finite.
  bool PackBlocks(const BlockColumns& columns, int64_t expert, int64_t first_block,
                  bool check) const;

  PanelView layout_{};                 ///< Of expert 0, pointers unset.
  const uint8_t* base_ = nullptr;      ///< 64-byte aligned.
  AlignedBuffer buffer_;               ///< Holds base_,
  std::shared_ptr<const void> owner_;  ///< or this does.
  int64_t codes_stride_ = 0;           ///< Bytes from one expert to the next.
  int64_t scales_stride_ = 0;
  int64_t zeros_stride_ = 0;
  int64_t biases_stride_ = 0;
  int64_t scales_offset_ = 0;
  int64_t zeros_offset_ = 0;
  int64_t biases_offset_ = 0;
  int64_t table_offset_ = 0;    ///< f32 [256].
  int64_t globals_offset_ = 0;  ///< f32 [experts].
  int64_t image_bytes_ = 0;
};

}  // namespace marlin::cpu
