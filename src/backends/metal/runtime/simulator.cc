#include "backends/metal/runtime/simulator.h"

#include "base/environment.h"

namespace marlin::metal {
namespace {

Code CodeOf(metal_sim::Code code) {
  switch (code) {
    case metal_sim::Code::kOk:
      return Code::kOk;
    case metal_sim::Code::kInvalidArgument:
      return Code::kInvalidArgument;
    case metal_sim::Code::kUnsupported:
      return Code::kUnsupported;
    case metal_sim::Code::kIo:
      return Code::kIo;
    case metal_sim::Code::kOutOfMemory:
      return Code::kOutOfMemory;
    case metal_sim::Code::kInternal:
      return Code::kInternal;
  }
  return Code::kInternal;
}

}  // namespace

Status FromSimulator(const metal_sim::Status& status) {
  return status.ok() ? Status() : Status(CodeOf(status.code()), status.message());
}

std::string SimulatorCompiler() {
  const auto named = ReadEnvironment("METAL_MARLIN_METAL_CLANG");
  return named ? named->value : "";
}

}  // namespace marlin::metal
