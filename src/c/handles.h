// The objects behind the C API's handles, and what its functions share: errors, structs, views.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/macros.h"
#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/marlin_c.h"
#include "marlin/moe.h"
#include "marlin/weights.h"

struct marlin_device {
  marlin::Device device;
};
struct marlin_buffer {
  marlin::DeviceBuffer buffer;
};
struct marlin_checkpoint {
  marlin::Checkpoint checkpoint;
};
struct marlin_weights {
  marlin::QuantizedWeights weights;
};
struct marlin_prepared {
  marlin::PreparedWeights weights;
};
struct marlin_plan {
  marlin::GemmPlan plan;
};
struct marlin_experts {
  marlin::ExpertSet experts;
};
struct marlin_experts_plan {
  marlin::ExpertsPlan plan;
};

namespace marlin {

/// The message of the last failure on this thread.
std::string& LastError();

/// Keeps a failure's message.
marlin_code Keep(const Status& status);

/// Runs the body of a C function: no exception escapes it.
template <typename Body>
marlin_code Guarded(const Body& body) {
  try {
    return Keep(body());
  } catch (const std::bad_alloc&) {
    try {
      return Keep(Status(Code::kOutOfMemory, "cannot allocate"));
    } catch (const std::bad_alloc&) {
      return MARLIN_OUT_OF_MEMORY;
    }
  } catch (const std::exception& error) {
    return Keep(Status(Code::kInternal, error.what()));
  } catch (...) {
    return Keep(Status(Code::kInternal, "an unknown exception"));
  }
}

Status NotNull(const void* argument, const char* name);

// Returns the error of a null argument.
#define MARLIN_NEED(argument) MARLIN_RETURN_IF_ERROR(NotNull(argument, #argument))

/// Stores a new handle through the caller's pointer.
template <typename Handle, typename Value>
Status Give(Result<Value> value, Handle** handle) {
  if (!value.ok()) return value.status();
  *handle = new Handle{*std::move(value)};
  return {};
}

/// Reads a caller's struct, which may be an older (shorter) or newer (longer) version; missing
/// fields keep their defaults.
template <typename Struct>
Status Read(const Struct* given, const char* name, Struct* known) {
  MARLIN_RETURN_IF_ERROR(NotNull(given, name));
  if (given->size < sizeof(size_t) || given->size > sizeof(Struct) + 4096) {
    return Invalid(std::string(name) + ": size " + std::to_string(given->size) +
                   " is not the size of an initialized struct");
  }
  std::memcpy(static_cast<void*>(known), given, std::min(given->size, sizeof(Struct)));
  return {};
}

/// Writes the fields within the size of a caller's struct, which keeps that size.
template <typename Struct>
Status Write(Struct known, const char* name, Struct* given) {
  Struct unused{};
  MARLIN_RETURN_IF_ERROR(Read(given, name, &unused));
  known.size = given->size;
  std::memcpy(static_cast<void*>(given), &known, std::min(given->size, sizeof(Struct)));
  return {};
}

/// A number as an enumerator, which the functions of the library check.
template <typename Enum>
Enum Enumerator(int32_t value) {
  return static_cast<Enum>(value < 0 || value > UINT8_MAX ? UINT8_MAX : value);
}

/// The view of a tensor. `name` is its name in errors.
Result<MutableTensorView> ViewOf(const marlin_tensor* given, const char* name);

/// The same of an optional tensor: empty if it is NULL.
Result<TensorView> OptionalView(const marlin_tensor* given, const char* name);

/// An expert's matrices, which then share the data of the handles. `name` is its name in errors.
Status ReadExpert(const marlin_expert& given, const std::string& name, Expert* expert);

/// The defaults if it is NULL.
Result<GemmArguments> ArgumentsOf(const marlin_gemm_arguments* given);

}  // namespace marlin
