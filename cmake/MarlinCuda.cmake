# MARLIN_CUDA=AUTO builds the CUDA backend if it finds a GPU and a CUDA toolkit that is new enough,
# and reports why if not: without a GPU, CUDA is not worth minutes of compiling. NVCC does so
# without a GPU, too, and ON requires the toolkit. The CUDA runtime is linked statically and loads
# the driver on first use, so the binaries also run on machines without a driver.
set(MARLIN_CUDA AUTO CACHE STRING "Build the CUDA backend: ON, OFF, AUTO (when nvcc and a GPU are \
found) or NVCC (when nvcc is found)")
set_property(CACHE MARLIN_CUDA PROPERTY STRINGS AUTO NVCC ON OFF)
option(MARLIN_CUDA_RACECHECK
       "Build kernels that compute-sanitizer's racecheck can follow, a few per cent slower" OFF)
# The kernels are instantiated for every code kind: kFp4 (fp4_e2m1), kInt4 (u4, s4), kTable4 (nf4,
# codebook4), kTable3 (nf3, int3), kTable2 (nf2, int2), kE4M3, kE5M2 (fp8_*), kInt8 (s8), kDense16
# (bf16, fp16). A build with some of the kinds compiles in a fraction of the time and refuses to
# prepare weights of the other kinds on a GPU.
set(MARLIN_CUDA_KINDS ALL CACHE STRING "Code kinds to build CUDA kernels for: ALL or a list")
set(MARLIN_HAVE_CUDA OFF)
set(MARLIN_CUDA_VERSION 12.5)
# Sanitizers and fuzzers instrument host code; nvcc rejects their flags.
set(wanted ${MARLIN_CUDA})
if(wanted MATCHES "AUTO|NVCC" AND (CMAKE_CROSSCOMPILING OR MARLIN_SANITIZE OR MARLIN_BUILD_FUZZERS))
  set(wanted OFF)
elseif(wanted STREQUAL "AUTO")
  execute_process(COMMAND nvidia-smi -L OUTPUT_VARIABLE gpus ERROR_QUIET RESULT_VARIABLE result)
  if(NOT gpus MATCHES "^GPU")
    message(STATUS "CUDA backend: no GPU is visible; -DMARLIN_CUDA=NVCC builds it where nvcc is found")
    set(wanted OFF)
  endif()
endif()
if(wanted MATCHES "AUTO|NVCC")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    find_package(CUDAToolkit ${MARLIN_CUDA_VERSION} QUIET)
    if(CUDAToolkit_FOUND AND TARGET CUDA::cudart_static)
      set(MARLIN_HAVE_CUDA ON)
    else()
      message(STATUS "CUDA backend: found nvcc, but no toolkit of ${MARLIN_CUDA_VERSION} or newer "
                     "(found: ${CUDAToolkit_VERSION})")
    endif()
  endif()
elseif(wanted STREQUAL "ON")
  set(MARLIN_HAVE_CUDA ON)
endif()
if(MARLIN_HAVE_CUDA)
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a-real)
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit ${MARLIN_CUDA_VERSION} REQUIRED)
  # CMake before 3.26 does not know nvcc's flag for C++20.
  if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  # --fmad=false: no contraction, as in host code; fused operations are written as fma.
  # Compressed kernels have a tenth of the size in the binary and are unpacked when loaded.
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    set(compress --compress-mode=size)
  else()
    set(compress -Xfatbinary=-compress-all)
  endif()
  # 554: a const view's conversion to itself is never called, which is intended.
  set(MARLIN_CUDA_FLAGS ${compress} --fmad=false -Xcompiler=-fvisibility=hidden --expt-relaxed-constexpr
      --diag-suppress=554)
  if(MARLIN_CUDA_RACECHECK)
    list(APPEND MARLIN_CUDA_FLAGS -DMARLIN_CUDA_RACECHECK)
  endif()
  if(MARLIN_WERROR)
    list(APPEND MARLIN_CUDA_FLAGS --Werror=all-warnings)
  endif()
endif()
message(STATUS "CUDA backend: ${MARLIN_HAVE_CUDA}")

# marlin_cuda_kinds(output FILE): sets output to the names in a *_kinds.def.
function(marlin_cuda_kinds output file)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(STRINGS ${file} names REGEX "^MARLIN_[A-Z0-9_]*KIND\\(")
  list(TRANSFORM names REPLACE "^[A-Z0-9_]*\\(([A-Za-z0-9]+)\\).*" "\\1")
  set(${output} ${names} PARENT_SCOPE)
endfunction()

# marlin_cuda_instances(output DIRECTORY): generates one source for every code kind and
# kernels/<family>/<name>_instance.cu.in, so that instances compile in parallel and rebuild
# separately. The kinds are those of MARLIN_CUDA_KINDS that are in <name>_kinds.def beside it, in
# layout/sparse_kinds.def for names that begin with sparse_, or else in layout/code_kinds.def.
# MARLIN_CUDA_KIND_BITS has a bit for every kind that is built, in the order of
# layout/code_kinds.def.
function(marlin_cuda_instances output directory)
  marlin_cuda_kinds(all ${directory}/layout/code_kinds.def)
  set(wanted ${MARLIN_CUDA_KINDS})
  if(wanted STREQUAL "ALL")
    set(wanted ${all})
  endif()
  set(unknown ${wanted})
  list(REMOVE_ITEM unknown ${all})
  if(unknown OR NOT wanted)
    message(FATAL_ERROR "MARLIN_CUDA_KINDS: expected ALL or some of ${all}, got '${MARLIN_CUDA_KINDS}'")
  endif()
  set(bits 0)
  foreach(kind IN LISTS wanted)
    list(FIND all ${kind} number)
    math(EXPR bits "${bits} | (1 << ${number})")
  endforeach()
  set(MARLIN_CUDA_KIND_BITS ${bits} PARENT_SCOPE)
  file(GLOB_RECURSE templates CONFIGURE_DEPENDS ${directory}/*_instance.cu.in)
  set(sources)
  foreach(template IN LISTS templates)
    string(REGEX REPLACE "_instance\\.cu\\.in$" "" path ${template})
    get_filename_component(kernel ${path} NAME)
    set(kinds ${path}_kinds.def)
    if(kernel MATCHES "^sparse_")
      set(kinds ${directory}/layout/sparse_kinds.def)
    elseif(NOT EXISTS ${kinds})
      set(kinds ${directory}/layout/code_kinds.def)
    endif()
    marlin_cuda_kinds(names ${kinds})
    foreach(MARLIN_KIND IN LISTS names)
      if(NOT MARLIN_KIND IN_LIST wanted)
        continue()
      endif()
      set(source ${MARLIN_GENERATED_DIR}/cuda/${kernel}_${MARLIN_KIND}.cu)
      configure_file(${template} ${source} @ONLY)
      list(APPEND sources ${source})
    endforeach()
  endforeach()
  set(${output} ${sources} PARENT_SCOPE)
endfunction()

# marlin_shipped_tuning(output DIRECTORY): generates the source that embeds the table
# tuning/h200.txt.
function(marlin_shipped_tuning output directory)
  set(table ${directory}/tuning/h200.txt)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table})
  file(READ ${table} MARLIN_TUNING)
  set(source ${MARLIN_GENERATED_DIR}/cuda/shipped_tuning.cc)
  configure_file(${directory}/tuning/shipped_tuning.cc.in ${source} @ONLY)
  set(${output} ${source} PARENT_SCOPE)
endfunction()
