#include "plan/gemm/host_staging.h"

#include <memory>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "plan/gemm/backend.h"

namespace marlin {
namespace {

/// Memory of a backend whose copies are done when they return.
class OrdinaryStaging final : public HostStaging {
 public:
  explicit OrdinaryStaging(AlignedBuffer buffer)
      : HostStaging(buffer.data(), buffer.size()), buffer_(std::move(buffer)) {}
  Status Record(void* /*stream*/) override { return {}; }
  Status Wait() override { return {}; }

 private:
  const AlignedBuffer buffer_;
};

void Store(void* out, DType type, int64_t i, float value) {
  if (type == DType::kF32) {
    static_cast<float*>(out)[i] = value;
  } else {
    static_cast<uint16_t*>(out)[i] = type == DType::kBf16 ? FloatToBf16(value) : FloatToHalf(value);
  }
}

}  // namespace

Result<std::unique_ptr<HostStaging>> Backend::AllocateStaging(int64_t bytes) const {
  MARLIN_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Allocate(bytes));
  return {std::make_unique<OrdinaryStaging>(std::move(buffer))};
}

Status Backend::CopyRowsToHostAsync(const RowsCopy& copy, void* stream) const {
  if (copy.rows == 1 || copy.stride_bytes == copy.row_bytes) {
    return CopyToHostAsync(copy.host, copy.device, copy.rows * copy.row_bytes, stream);
  }
  for (int64_t row = 0; row < copy.rows; ++row) {
    MARLIN_RETURN_IF_ERROR(
        CopyToHostAsync(static_cast<std::byte*>(copy.host) + row * copy.row_bytes,
                        static_cast<const std::byte*>(copy.device) + row * copy.stride_bytes,
                        copy.row_bytes, stream));
  }
  return {};
}

Status Backend::AddRows(const AddRowsCall& call, void* stream) const {
  MARLIN_RETURN_IF_ERROR(Synchronize(stream));
  for (int64_t t = 0; t < call.tokens; ++t) {
    const int64_t slot = call.rows == nullptr ? -1 : call.slot_of[t];
    const float* const sum = call.sum == nullptr ? nullptr : call.sum + t * call.width;
    const float* const row = slot < 0 ? nullptr : call.rows + slot * call.width;
    for (int64_t i = 0; i < call.width; ++i) {
      float value = sum == nullptr ? 0.0F : sum[i];
      // A row alone keeps its bits, the sign of a zero among them.
      if (row != nullptr) value = sum == nullptr ? row[i] : value + row[i];
      Store(call.out, call.out_type, t * call.out_stride + i, value);
    }
  }
  return {};
}

}  // namespace marlin
