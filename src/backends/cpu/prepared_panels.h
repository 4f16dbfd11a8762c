// Prepared weights of the CPU backend: panels of every expert in one allocation.
#pragma once

#include <memory>

#include "backends/cpu/panels.h"
#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "plan/backend.h"

namespace marlin::cpu {

class PreparedPanels : public PreparedWeights::Storage {
 public:
  /// Rearranges validated weights. Errors: kOutOfMemory.
  static Result<std::shared_ptr<const PreparedPanels>> Make(const QuantizedWeights& weights,
                                                            const Backend* backend,
                                                            ThreadPool& pool);
  PanelView View(int64_t expert) const;

 private:
  /// Fills the panels of a run of blocks.
  void PackRun(const QuantizedWeights& weights, int64_t expert, int64_t first_block) const;

  PanelView layout_{};  ///< Of expert 0, pointers unset.
  AlignedBuffer buffer_;
  AlignedBuffer table_;
  int64_t codes_stride_ = 0;  ///< Bytes from one expert to the next.
  int64_t scales_stride_ = 0;
  int64_t zeros_stride_ = 0;
  int64_t biases_stride_ = 0;
  int64_t scales_offset_ = 0;
  int64_t zeros_offset_ = 0;
  int64_t biases_offset_ = 0;
  std::vector<float> global_scales_;
};

}  // namespace marlin::cpu
