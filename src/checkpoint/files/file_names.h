// Names of the files of a checkpoint's directory.
#pragma once

#include <string_view>

namespace marlin {

inline constexpr std::string_view kConfigFile = "config.json";
inline constexpr std::string_view kSafetensors = ".safetensors";  ///< The suffix of a shard.

}  // namespace marlin
