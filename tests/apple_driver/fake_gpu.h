// A stand-in for Apple's Metal: objects that answer as Metal's do, on a GPU that is the simulator.
// It is as lazy as a GPU may be: nothing runs before somebody waits for it. What Metal's validation
// objects to ends the program.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace marlin::fake_gpu {

/// What the GPU is like, and what goes wrong with it.
struct Behaviour {
  bool there = true;   ///< MTLCreateSystemDefaultDevice finds it.
  bool listed = true;  ///< MTLCopyAllDevices does.
  std::string name = "Apple M2";
  int family = 8;
  bool math_modes = true;      ///< macOS 15's.
  bool residency_sets = true;  ///< macOS 15's.
  bool registered_by_number = true;
  bool registered_by_class = true;
  int cores = 2;

  std::string compiler_error;  ///< Every source fails with it.
  std::string compiler_warning;
  std::string missing_function;
  std::string built_library;  ///< What BuiltLibrary holds: names of the sources in it.
  bool refuses_built_library = false;
  uint64_t most_threads = 1024;
  uint64_t simdgroup_threads = 32;

  bool maps_pages = true;  ///< Takes the caller's pages as buffers.
  uint64_t largest_buffer = uint64_t{1} << 32;
  int64_t buffers_until_full = -1;  ///< Makes so many more; -1: no end.
  int64_t fails_from = -1;       ///< The command buffer of this number, from 0, and all later ones.
  std::function<void()> on_run;  ///< Called before each command buffer runs.
  bool rotates_fragments = false;  ///< Lanes hold other elements than on Apple's GPUs.
  bool breaks_products = false;    ///< Of matrices, in the self-test.
  bool breaks_sums = false;        ///< The first output of everything else.
};

/// Set before a device is opened.
Behaviour& TheBehaviour();

/// What happened since Reset.
struct Log {
  int64_t command_buffers = 0;  ///< Committed.
  int64_t dispatches = 0;       ///< Run.
  int64_t sources = 0;          ///< Compiled.
  int64_t pipelines = 0;
  int64_t buffers = 0;        ///< Made with memory of their own.
  int64_t mapped = 0;         ///< Buffers on the caller's pages.
  int64_t resident = 0;       ///< Buffers in residency sets.
  uint64_t input_offset = 0;  ///< Of MARLIN_BUFFER_INPUT, last bound.
  bool fast_math = false;     ///< Of the last source compiled.
};
Log& TheLog();

/// Makes everything as it was at the start.
void Reset();

/// An MTL::CommandQueue* of a device of its own, or of the default one; the caller's.
void* NewQueue(bool other_device);
void ReleaseQueue(void* queue);

}  // namespace marlin::fake_gpu
