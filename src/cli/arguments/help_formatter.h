// --help in lines of at most 100 columns.
#pragma once

#include <memory>

namespace CLI {
class FormatterBase;
}

namespace marlin::cli {

/// The heading of the options that every command has, which comes last.
inline constexpr const char* kGeneralGroup = "General";

std::shared_ptr<CLI::FormatterBase> MakeHelpFormatter();

}  // namespace marlin::cli
