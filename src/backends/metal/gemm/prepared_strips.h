// Prepared weights of the Metal backend: the strips of all experts in one allocation.
#pragma once

#include <memory>
#include <vector>

#include "backends/metal/gemm/strip_layout.h"
#include "backends/metal/runtime/driver.h"
#include "base/thread_pool.h"
#include "plan/gemm/backend.h"

namespace marlin::metal {

/// One array of an expert's weights: codes, scales, extras or table.
struct StripPart {
  const uint8_t* data = nullptr;
  int64_t bytes = 0;
};

/// The type of zero points, or else of biases.
DType ExtraDType(const WeightsSpec& spec);
/// Bytes of a zero point or bias; 0: there are none.
int64_t ExtraBytes(const WeightsSpec& spec);

class PreparedStrips : public PreparedWeights::Storage {
 public:
  /// Packs validated weights into memory of `driver`, which it keeps alive. Errors: kOutOfMemory.
  static Result<std::shared_ptr<PreparedStrips>> Make(const QuantizedWeights& weights,
                                                      const Backend* backend,
                                                      const std::shared_ptr<Driver>& driver,
                                                      ThreadPool& pool);
  ~PreparedStrips() override;
  PreparedStrips() = default;
  PreparedStrips& operator=(const PreparedStrips&) = delete;

  /// The same shapes with null addresses and no memory, for weights that a framework owns.
  std::shared_ptr<PreparedStrips> WithoutMemory() const;

  StripPart codes(int64_t expert) const { return Part(0, expert * codes_bytes_, codes_bytes_); }
  StripPart scales(int64_t expert) const {
    return Part(scales_offset_, expert * scales_bytes_, scales_bytes_);
  }
  /// Zero points or biases.
  StripPart extras(int64_t expert) const {
    return Part(extras_offset_, expert * extras_bytes_, extras_bytes_);
  }
  StripPart table() const { return Part(table_offset_, 0, table_bytes_); }
  float global_scale(int64_t expert) const { return global_scales_[static_cast<size_t>(expert)]; }
  /// Whether codes and zero points are integers, whose difference and that with the codes' bias
  /// (kernels/decode.h) are exact.
  bool has_integer_zeros() const { return integer_zeros_; }
  int64_t strips() const { return strips_; }
  int64_t chunks() const { return chunks_; }

 private:
  PreparedStrips(const PreparedStrips&) = default;
  StripPart Part(int64_t offset, int64_t begin, int64_t part_bytes) const {
    return {data_ == nullptr ? nullptr : data_ + offset + begin, part_bytes};
  }
  void PackStrip(const QuantizedWeights& weights, int64_t expert, int64_t strip) const;

  std::shared_ptr<Driver> driver_;
  uint8_t* data_ = nullptr;
  int64_t strips_ = 0;
  int64_t chunks_ = 0;
  int64_t codes_bytes_ = 0;  ///< Per expert, as scales_bytes_ and extras_bytes_.
  int64_t scales_bytes_ = 0;
  int64_t extras_bytes_ = 0;
  int64_t table_bytes_ = 0;
  int64_t scales_offset_ = 0;
  int64_t extras_offset_ = 0;
  int64_t table_offset_ = 0;
  bool integer_zeros_ = false;
  std::vector<float> global_scales_;
};

}  // namespace marlin::metal
