/* The version of these headers, for the C and C++ preprocessor. CMake reads it from this file; a
 * test compares pyproject.toml's with it. */
#ifndef MARLIN_VERSION_H_
#define MARLIN_VERSION_H_

#define MARLIN_VERSION_MAJOR 0
#define MARLIN_VERSION_MINOR 2
#define MARLIN_VERSION_PATCH 0

/* MARLIN_VERSION >= MARLIN_MAKE_VERSION(0, 2, 0) */
#define MARLIN_MAKE_VERSION(major, minor, patch) ((major)*1000000 + (minor)*1000 + (patch))
#define MARLIN_VERSION \
  MARLIN_MAKE_VERSION(MARLIN_VERSION_MAJOR, MARLIN_VERSION_MINOR, MARLIN_VERSION_PATCH)

#ifdef __cplusplus
#pragma GCC visibility push(default)
namespace marlin {

/// The version of the loaded library, "0.2.0"; MARLIN_VERSION is the headers'.
const char* Version();

}  // namespace marlin
#pragma GCC visibility pop
#endif

#endif /* MARLIN_VERSION_H_ */
