// Where the sources are: the sample models and golden files that tests read.
#pragma once

#include <string>

namespace marlin {

/// The project's root. Only one object of a build has the path in it, so that builds of other
/// folders find all others in the compiler cache.
std::string SourceDirectory();

}  // namespace marlin
