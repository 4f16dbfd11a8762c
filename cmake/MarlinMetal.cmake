# MARLIN_METAL_SIM=AUTO builds the simulator of Metal kernels if it finds Boost.Context, and reports
# why if not; ON requires it. Boost is linked statically, so that a wheel or a copied command does
# not depend on it.
include(${PROJECT_SOURCE_DIR}/metal_sim/cmake/EmbedFiles.cmake)
set(MARLIN_METAL_SIM AUTO CACHE STRING
    "Build the simulator of Metal kernels: ON, OFF or AUTO (when Boost.Context is found)")
set_property(CACHE MARLIN_METAL_SIM PROPERTY STRINGS AUTO ON OFF)
set(MARLIN_HAVE_METAL_SIM OFF)
set(why "switched off")
if(NOT MARLIN_METAL_SIM STREQUAL "OFF")
  if(MARLIN_METAL_SIM STREQUAL "AUTO" AND NOT PROJECT_IS_TOP_LEVEL)
    # A parent project has not asked for Boost.
    set(why "not asked for")
  elseif(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set(why "only for Linux: kernels are ELF libraries, found by the linker's list of them")
  elseif(MARLIN_SANITIZE MATCHES "memory")
    # MemorySanitizer does not see the writes of kernels, which are compiled without it.
    set(why "not with MemorySanitizer")
  else()
    set(Boost_USE_STATIC_LIBS ON)
    find_package(Boost 1.71 QUIET COMPONENTS context)
    set(MARLIN_HAVE_METAL_SIM ${Boost_CONTEXT_FOUND})
    set(why "Boost.Context 1.71 or newer was not found for ${CMAKE_SYSTEM_PROCESSOR}: \
libboost-context-dev")
  endif()
  if(MARLIN_METAL_SIM STREQUAL "ON" AND NOT MARLIN_HAVE_METAL_SIM)
    message(FATAL_ERROR "MARLIN_METAL_SIM=ON: ${why}")
  endif()
endif()
if(MARLIN_HAVE_METAL_SIM)
  message(STATUS "Metal simulator: ON")
else()
  message(STATUS "Metal simulator: OFF (${why})")
endif()
