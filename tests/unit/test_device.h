// The device of tests that run on more than one: the CPU, or what tests/CMakeLists.txt builds them
// for.
#pragma once

#ifndef MARLIN_TEST_DEVICE
#define MARLIN_TEST_DEVICE "cpu"
#else
/// The tests' own memory is the device's, too (managed_memory.cc).
#define MARLIN_TEST_MANAGED 1
#endif
