# MARLIN_CUDA=AUTO builds the CUDA backend where a CUDA toolkit that is new enough is found, and says
# why not where it is not; ON demands it. The runtime library is
# linked statically and loads the driver when it is first used, so that what is built also runs on
# machines without one.
set(MARLIN_CUDA AUTO CACHE STRING "Build the CUDA backend: ON, OFF or AUTO (when nvcc is found)")
set_property(CACHE MARLIN_CUDA PROPERTY STRINGS AUTO ON OFF)
set(MARLIN_HAVE_CUDA OFF)
set(MARLIN_CUDA_VERSION 12.5)
# Sanitizers and fuzzers look at host code; nvcc does not take their flags.
if(MARLIN_CUDA STREQUAL "AUTO" AND NOT CMAKE_CROSSCOMPILING AND NOT MARLIN_SANITIZE
   AND NOT MARLIN_BUILD_FUZZERS)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    find_package(CUDAToolkit ${MARLIN_CUDA_VERSION} QUIET)
    if(CUDAToolkit_FOUND AND TARGET CUDA::cudart_static)
      set(MARLIN_HAVE_CUDA ON)
    else()
      message(STATUS "CUDA backend: nvcc is there, but no toolkit of ${MARLIN_CUDA_VERSION} or newer "
                     "(found: ${CUDAToolkit_VERSION})")
    endif()
  endif()
elseif(MARLIN_CUDA STREQUAL "ON")
  set(MARLIN_HAVE_CUDA ON)
endif()
if(MARLIN_HAVE_CUDA)
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a-real)
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit ${MARLIN_CUDA_VERSION} REQUIRED)
  # Before 3.26 CMake does not know how nvcc is asked for C++20.
  if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  # No contraction as in host code: what is fused is written as fma.
  set(MARLIN_CUDA_FLAGS --fmad=false -Xcompiler=-fvisibility=hidden --expt-relaxed-constexpr)
  if(MARLIN_WERROR)
    list(APPEND MARLIN_CUDA_FLAGS --Werror=all-warnings)
  endif()
endif()
message(STATUS "CUDA backend: ${MARLIN_HAVE_CUDA}")

# marlin_cuda_instances(output DIRECTORY): one source for every kernel template and kind of codes, so
# that they compile in parallel and one can be changed without the others.
function(marlin_cuda_instances output directory)
  file(STRINGS ${directory}/code_kinds.def lines REGEX "^MARLIN_KIND\\(")
  set(sources)
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^MARLIN_KIND\\(([A-Za-z0-9]+)\\)" "\\1" MARLIN_KIND "${line}")
    foreach(kernel exact gemv wgmma)
      set(source ${MARLIN_GENERATED_DIR}/cuda/${kernel}_${MARLIN_KIND}.cu)
      configure_file(${directory}/${kernel}_instance.cu.in ${source} @ONLY)
      list(APPEND sources ${source})
    endforeach()
  endforeach()
  set(${output} ${sources} PARENT_SCOPE)
endfunction()
