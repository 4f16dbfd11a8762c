// Operations for devices where the host computes a part of the work: memory to exchange rows with
// the host, and their sum.
#pragma once

#include <cstddef>
#include <cstdint>

#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// Host memory that a device copies to and from while it and the host work on. Used by one run at a
/// time; must not outlive its backend. The destructor waits as Wait does.
class HostStaging {
 public:
  HostStaging(std::byte* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  virtual ~HostStaging() = default;
  HostStaging(const HostStaging&) = delete;
  HostStaging& operator=(const HostStaging&) = delete;

  /// 64-byte aligned.
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  /// Marks the end of the work that is on the stream now. Errors: kDeviceLost.
  virtual Status Record(void* stream) = 0;
  /// Waits for the work before the last mark; returns at once without one. Reports no values that
  /// kernels found invalid, which are for Synchronize. Errors: kDeviceLost.
  virtual Status Wait() = 0;

 private:
  std::byte* const data_;
  const int64_t bytes_;
};

/// Rows of a copy; the device's are stride_bytes apart, the host's adjacent.
struct RowsCopy {
  void* host = nullptr;
  const void* device = nullptr;
  int64_t rows = 0;
  int64_t row_bytes = 0;
  int64_t stride_bytes = 0;
};

/// out[t] = sum[t] + rows[slot_of[t]] for every token, in fp32, rounded once; without a slot (-1)
/// sum[t]. All is device memory. Columns are contiguous; the rows of `sum` and `rows` are adjacent.
struct AddRowsCall {
  const float* sum = nullptr;        ///< [tokens, width]; null: zeros.
  const float* rows = nullptr;       ///< [slots, width]; null: none.
  const int32_t* slot_of = nullptr;  ///< [tokens], unless `rows` is null.
  int64_t slots = 0;                 ///< Rows of `rows`.
  int64_t tokens = 0;
  int64_t width = 0;
  void* out = nullptr;
  int64_t out_stride = 0;  ///< In elements.
  DType out_type = DType::kF32;
};

}  // namespace marlin
