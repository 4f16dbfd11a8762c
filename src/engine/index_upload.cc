#include "engine/index_upload.h"

#include <fmt/core.h>

#include "base/macros.h"

namespace marlin {

IndexUpload::Part IndexUpload::Add(std::span<const int32_t> values) {
  const Part part{numbers_.size(), values.size()};
  numbers_.insert(numbers_.end(), values.begin(), values.end());
  return part;
}

IndexUpload::Part IndexUpload::AddRoom(size_t count) {
  const Part part{numbers_.size(), count};
  numbers_.resize(numbers_.size() + count);
  return part;
}

Status IndexUpload::Send(Arena& arena) {
  MARLIN_ASSIGN_OR_RETURN(all_, arena.Upload(numbers_));
  return {};
}

Result<MutableTensorView> IndexUpload::View(const Part& part, const Shape& shape) const {
  const auto end = static_cast<int64_t>(part.first + part.count);
  if (shape.ElementCount() != static_cast<int64_t>(part.count) || end > all_.ElementCount()) {
    return Status(Code::kInternal,
                  fmt::format("upload: {} numbers as {}", part.count, shape.ToString()));
  }
  return MutableTensorView(all_.As<int32_t>() + part.first, DType::kI32, shape);
}

MutableTensorView IndexUpload::View(const Part& part) const {
  return {all_.As<int32_t>() + part.first, DType::kI32, {static_cast<int64_t>(part.count)}};
}

}  // namespace marlin
