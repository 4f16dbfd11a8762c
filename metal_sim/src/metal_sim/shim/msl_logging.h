// Metal's log: messages of kernels go to the standard error stream.
#pragma once

#include <cstdio>

#include "metal_sim/shim/msl_vector.h"

namespace metal_sim {

/// As a variadic function takes it.
template <typename T>
METAL_SIM_INLINE auto Promoted(T value) {
  if constexpr (std::is_same_v<T, half> || std::is_same_v<T, bfloat>) {
    return static_cast<double>(static_cast<float>(value));
  } else {
    return value;
  }
}

}  // namespace metal_sim

namespace metal_sim_program::metal {

enum os_log_type : uint {
  os_log_type_default = 0,
  os_log_type_info = 1,
  os_log_type_debug = 2,
  os_log_type_error = 16,
  os_log_type_fault = 17,
};

class os_log {
 public:
  constexpr os_log(const char* subsystem, const char* category)
      : subsystem_(subsystem), category_(category) {}

  template <typename... Values>
  METAL_SIM_UNINSTRUMENTED void log_with_type(os_log_type, const char* format,
                                              Values... values) const {
    std::fprintf(stderr, "%s:%s: ", subsystem_, category_);
    if constexpr (sizeof...(Values) == 0) {
      std::fputs(format, stderr);
    } else {
      std::fprintf(stderr, format, ::metal_sim::Promoted(values)...);
    }
    std::fputc('\n', stderr);
  }
#define METAL_SIM_LOG(NAME, TYPE)                                          \
  template <typename... Values>                                            \
  METAL_SIM_INLINE void NAME(const char* format, Values... values) const { \
    log_with_type(TYPE, format, values...);                                \
  }
  METAL_SIM_LOG(log, os_log_type_default)
  METAL_SIM_LOG(log_info, os_log_type_info)
  METAL_SIM_LOG(log_debug, os_log_type_debug)
  METAL_SIM_LOG(log_error, os_log_type_error)
  METAL_SIM_LOG(log_fault, os_log_type_fault)
#undef METAL_SIM_LOG

 private:
  const char* subsystem_;
  const char* category_;
};

inline constexpr os_log os_log_default("metal", "default");

}  // namespace metal_sim_program::metal
