#include "source_directory.h"

namespace marlin {

std::string SourceDirectory() { return MARLIN_SOURCE_DIR; }

}  // namespace marlin
