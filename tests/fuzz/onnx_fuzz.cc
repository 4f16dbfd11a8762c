// ONNX files: what opens has its tensors inside the file, and can be loaded and imported.
#include <nlohmann/json.hpp>

#include "container_checks.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  marlin::fuzz::CheckContainer("model.onnx", {reinterpret_cast<const char*>(data), size});
  return 0;
}
