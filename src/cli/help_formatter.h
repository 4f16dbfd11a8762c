// --help in lines of at most 100 columns.
#pragma once

#include <memory>

namespace CLI {
class FormatterBase;
}

namespace marlin::cli {

std::shared_ptr<CLI::FormatterBase> MakeHelpFormatter();

}  // namespace marlin::cli
