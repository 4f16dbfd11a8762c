// The values that a decoder's config.json leaves out.
#pragma once

#include <string_view>

namespace marlin {

/// The values, as JSON, that the configuration class of a type in transformers takes for keys that
/// config.json lacks: every key that the library reads of that type, except for those of RoPE
/// scaling. null stands for a value that others give (heads for KV heads, ...), or for none. Empty
/// for an unknown type. tests/integrations/test_config_keys.py compares it with transformers.
std::string_view TypeDefaults(std::string_view model_type);

}  // namespace marlin
