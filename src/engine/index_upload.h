// The i32 vectors that a pass uploads, in one copy.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/forward.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

class IndexUpload {
 public:
  /// The place of a vector in the upload.
  struct Part {
    size_t first = 0;
    size_t count = 0;
  };

  Part Add(std::span<const int32_t> values);
  /// Room for numbers that the device writes.
  Part AddRoom(size_t count);
  /// Uploads what was added. Errors: kOutOfMemory.
  Status Send(Arena& arena);

  /// A part as a view. Precondition: Send. Errors: kInternal if the shape has another number of
  /// elements.
  Result<MutableTensorView> View(const Part& part, const Shape& shape) const;
  /// A part as a vector.
  MutableTensorView View(const Part& part) const;

 private:
  std::vector<int32_t> numbers_;
  MutableTensorView all_;
};

}  // namespace marlin
