// A fake of Apple's Metal: objects that behave like Metal's, on a GPU that is the simulator. It is
// as lazy as a GPU may be: nothing runs until the host waits for it, and dispatches without a
// barrier between them run in reverse order. Two of those that use the same memory, which one of
// them writes, fail their command buffer. Violations that Metal's validation layer reports abort
// the program.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace marlin::fake_gpu {

/// Properties and injected faults of the fake GPU.
struct Behaviour {
  bool there = true;   ///< MTLCreateSystemDefaultDevice returns it.
  bool listed = true;  ///< MTLCopyAllDevices lists it.
  std::string name = "Apple M2";
  int family = 8;
  bool math_modes = true;      ///< As in macOS 15.
  bool residency_sets = true;  ///< As in macOS 15.
  bool registered_by_number = true;
  bool registered_by_class = true;
  int cores = 2;

  std::string compiler_error;  ///< Compilation of every source fails with it.
  std::string compiler_warning;
  std::string missing_function;
  std::string built_library;  ///< Content of BuiltLibrary: the names of its sources.
  bool refuses_built_library = false;
  uint64_t most_threads = 1024;
  uint64_t simdgroup_threads = 32;

  bool takes_serial = false;  ///< Accepts serial encoders, which the driver does not make.
  bool maps_pages = true;     ///< Accepts host pages as buffers.
  uint64_t largest_buffer = uint64_t{1} << 32;
  int64_t buffers_until_full = -1;  ///< Number of buffers until allocation fails; -1: unlimited.
  int64_t fails_from = -1;       ///< This command buffer, counted from 0, and all later ones fail.
  int64_t fails = -1;            ///< How many do; -1: all.
  int64_t error = 1;             ///< The MTLCommandBufferError of those.
  int64_t drops_barrier = -1;    ///< This barrier, counted from 0, does nothing.
  std::function<void()> on_run;  ///< Called before each command buffer runs.
  bool rotates_fragments = false;  ///< Fragments have another layout than on Apple's GPUs.
  bool breaks_products = false;    ///< Corrupts matrix products in the self-test.
  bool breaks_shuffles = false;    ///< The same for a shuffle,
  bool breaks_addresses = false;   ///< and for a number that is found through an address.
  bool breaks_sums = false;        ///< Corrupts the first output of all other kernels.
  std::string breaks;              ///< Corrupts the first output of this function.
};

/// To be set before a device is opened.
Behaviour& TheBehaviour();

/// Event counts since Reset.
struct Log {
  int64_t command_buffers = 0;  ///< Committed command buffers.
  int64_t waits = 0;            ///< Waits for command buffers that had not run.
  int64_t dispatches = 0;       ///< Executed dispatches.
  int64_t barriers = 0;
  int64_t sources = 0;          ///< Compiled sources.
  int64_t pipelines = 0;        ///< Compiled ones.
  int64_t found_pipelines = 0;  ///< In an archive.
  int64_t buffers = 0;          ///< Buffers with their own memory.
  int64_t mapped = 0;           ///< Buffers that map host pages.
  int64_t resident = 0;         ///< Buffers in residency sets.
  int64_t residency_commits = 0;
  int64_t used_resources = 0;  ///< Buffers named by useResources.
  uint64_t input_offset = 0;   ///< Offset of the last bound MARLIN_BUFFER_INPUT.
  bool fast_math = false;      ///< Fast-math setting of the last compiled source.
};
Log& TheLog();

/// Restores the initial state, without a home folder: what drivers keep there outlives a test.
void Reset();

/// Creates an MTL::CommandQueue* of another device or of the default one; owned by the caller.
void* NewQueue(bool other_device);
void ReleaseQueue(void* queue);

}  // namespace marlin::fake_gpu
