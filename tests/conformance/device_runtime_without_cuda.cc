#include "streams.h"

namespace marlin::conformance {

Result<std::shared_ptr<void>> MakeStream(std::string_view backend) {
  if (backend == "cuda") return Status(Code::kInternal, "stream: built without CUDA");
  return std::shared_ptr<void>();
}

}  // namespace marlin::conformance
