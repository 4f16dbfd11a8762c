# MARLIN_SANITIZE=address;undefined builds everything with those sanitizers; a report aborts the
# program.
set(MARLIN_SANITIZE "" CACHE STRING "Sanitizers for all targets: address;undefined, thread, memory")
if(MARLIN_BUILD_FUZZERS)
  # Coverage instrumentation of all code, not only of the fuzz targets, but for kernels and tests.
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
if(MARLIN_SANITIZE)
  list(JOIN MARLIN_SANITIZE "," sanitizers)
  add_compile_options(-fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${sanitizers})
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND "address" IN_LIST MARLIN_SANITIZE)
    # The sanitizers' tables hold millions of addresses, which a position-independent program fills
    # in whenever it starts.
    add_link_options($<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:-no-pie>)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # g++ reports uninitialized values in <regex> and <variant> because of the inserted checks.
    add_compile_options(-Wno-maybe-uninitialized)
  endif()
endif()

# Without it, kernel files are compiled as ever, in a tenth of the time.
option(MARLIN_SANITIZE_KERNELS "Instrument the CPU kernels in sanitizer builds" OFF)

# Kernel files, whose vectors and lambdas are inlined into huge functions, would take several times
# as long with checks of every pointer, each of which AddressSanitizer makes where the pointer is
# used. Fuzz targets run no kernel.
set(MARLIN_KERNEL_FLAGS)
if(MARLIN_SANITIZE AND NOT MARLIN_SANITIZE_KERNELS)
  set(MARLIN_KERNEL_FLAGS -fno-sanitize=all)
elseif("address" IN_LIST MARLIN_SANITIZE)
  set(MARLIN_KERNEL_FLAGS -fno-sanitize=null,object-size,pointer-overflow)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Checks by calls: g++ spends half of its time on registers around branches to reports.
    list(APPEND MARLIN_KERNEL_FLAGS --param=asan-instrumentation-with-call-threshold=0)
  endif()
endif()
if(MARLIN_BUILD_FUZZERS)
  set(MARLIN_NO_COVERAGE -fno-sanitize=fuzzer-no-link)
  list(APPEND MARLIN_KERNEL_FLAGS ${MARLIN_NO_COVERAGE})
endif()
