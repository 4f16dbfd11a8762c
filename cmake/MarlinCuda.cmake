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
# The code of an older GPU, to test it on a newer one: 80 compiles what GPUs of 8.0 run for this
# machine's GPU (or for 9.0), without what is newer, and in place of CMAKE_CUDA_ARCHITECTURES.
set(MARLIN_CUDA_ARCH "" CACHE STRING "Compile CUDA as for this compute capability, such as 80, to \
run it on a later one")
include(MarlinCudaCodes)

# The capabilities of this machine's GPUs that can run the kernels, times ten.
function(marlin_gpu_capabilities output)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE found ERROR_QUIET RESULT_VARIABLE result)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]" found "${found}")
  list(TRANSFORM found REPLACE "\\." "")
  list(REMOVE_DUPLICATES found)
  list(FILTER found EXCLUDE REGEX "^[1-7].$")
  set(${output} "${found}" PARENT_SCOPE)
endfunction()

# Sets CMAKE_CUDA_ARCHITECTURES to the user's, or to the code of this machine's GPUs, or without one,
# and for `all`, to every row of MarlinCudaCodes.cmake. MARLIN_CUDA_CODE_NAMES names the codes.
macro(marlin_cuda_architectures)
  marlin_gpu_capabilities(gpus)
  execute_process(COMMAND ${CUDAToolkit_NVCC_EXECUTABLE} --list-gpu-code OUTPUT_VARIABLE known)
  string(REGEX MATCHALL "[0-9]+" known "${known}")
  if(MARLIN_CUDA_ARCH)
    if(NOT gpus)
      set(gpus 90)
    endif()
    marlin_forced_code_flags(MARLIN_CUDA_CODE_FLAGS ${MARLIN_CUDA_ARCH} ${gpus})
    marlin_code_names(MARLIN_CUDA_CODE_NAMES ${MARLIN_CUDA_ARCH}-real)
    set(CMAKE_CUDA_ARCHITECTURES OFF)
  else()
    set(wanted_codes "${CMAKE_CUDA_ARCHITECTURES}")
    if(wanted_codes STREQUAL "native")
      set(wanted_codes "")
    endif()
    if(wanted_codes MATCHES "^all" OR NOT (gpus OR wanted_codes))
      marlin_known_rows(CMAKE_CUDA_ARCHITECTURES ${known})
    elseif(wanted_codes)
      marlin_usable_codes(CMAKE_CUDA_ARCHITECTURES ${wanted_codes})
    else()
      set(CMAKE_CUDA_ARCHITECTURES "")
      foreach(gpu IN LISTS gpus)
        marlin_rows_for_gpu(rows ${gpu} ${known})
        list(APPEND CMAKE_CUDA_ARCHITECTURES ${rows})
      endforeach()
      list(REMOVE_DUPLICATES CMAKE_CUDA_ARCHITECTURES)
    endif()
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES: expected 80 or later, all or native, got "
                          "'${wanted_codes}'")
    endif()
    marlin_code_names(MARLIN_CUDA_CODE_NAMES ${CMAKE_CUDA_ARCHITECTURES})
  endif()
  # Hopper's own kernels are compiled for 9.0a alone.
  set(MARLIN_HOPPER_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES})
  list(FILTER MARLIN_HOPPER_ARCHITECTURES INCLUDE REGEX "^90a")
  message(STATUS "CUDA code: ${MARLIN_CUDA_CODE_NAMES}")
endmacro()

set(MARLIN_HAVE_CUDA OFF)
set(MARLIN_CUDA_VERSION 12.5)
# Sanitizers and fuzzers instrument host code; nvcc rejects their flags.
set(wanted ${MARLIN_CUDA})
if(wanted MATCHES "AUTO|NVCC" AND (CMAKE_CROSSCOMPILING OR MARLIN_SANITIZE OR MARLIN_BUILD_FUZZERS))
  set(wanted OFF)
elseif(wanted STREQUAL "AUTO")
  marlin_gpu_capabilities(gpus)
  if(NOT gpus)
    message(STATUS "CUDA backend: no GPU of 8.0 or later is visible; -DMARLIN_CUDA=NVCC builds it "
                   "where nvcc is found")
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
  find_package(CUDAToolkit ${MARLIN_CUDA_VERSION} REQUIRED)
  marlin_cuda_architectures()
  enable_language(CUDA)
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
  set(MARLIN_CUDA_FLAGS ${MARLIN_CUDA_CODE_FLAGS} ${compress} --fmad=false
      -Xcompiler=-fvisibility=hidden --expt-relaxed-constexpr --diag-suppress=554)
  if(MARLIN_CUDA_RACECHECK)
    list(APPEND MARLIN_CUDA_FLAGS -DMARLIN_CUDA_RACECHECK)
  endif()
  if(MARLIN_WERROR)
    list(APPEND MARLIN_CUDA_FLAGS --Werror=all-warnings)
  endif()
endif()
message(STATUS "CUDA backend: ${MARLIN_HAVE_CUDA}")

# marlin_wanted_kinds(output ALL...): sets output to the kinds of MARLIN_CUDA_KINDS.
function(marlin_wanted_kinds output)
  set(wanted ${MARLIN_CUDA_KINDS})
  if(wanted STREQUAL "ALL")
    set(wanted ${ARGN})
  endif()
  set(unknown ${wanted})
  list(REMOVE_ITEM unknown ${ARGN})
  if(unknown OR NOT wanted)
    message(FATAL_ERROR "MARLIN_CUDA_KINDS: expected ALL or some of ${ARGN}, got '${MARLIN_CUDA_KINDS}'")
  endif()
  set(${output} ${wanted} PARENT_SCOPE)
endfunction()

# marlin_cuda_instances(output hopper_output DIRECTORY): generates a source from
# plan/instance.cu.in for every kernel of plan/instances.def and every kind of its tiles that
# MARLIN_CUDA_KINDS has, so that they compile in parallel and rebuild separately; the sources of
# Hopper's own kernels apart. MARLIN_CUDA_KIND_BITS has a bit for every kind that is built, in the
# order of CodeKind.
function(marlin_cuda_instances output hopper_output directory)
  set(table ${directory}/plan/instances.def)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table})
  file(STRINGS ${table} rows REGEX "^MARLIN_[A-Z_]+\\(")
  set(sources)
  set(hopper_sources)
  foreach(row IN LISTS rows)
    string(REGEX MATCHALL "[A-Za-z0-9_/.]+" row "${row}")
    list(POP_FRONT row macro name)
    if(macro STREQUAL "MARLIN_KINDS")
      set(${name} ${row})
      continue()
    endif()
    marlin_wanted_kinds(wanted ${kAll})
    list(POP_FRONT row header dense sparse)
    foreach(tiles IN ITEMS dense sparse)
      set(is_sparse false)
      if(tiles STREQUAL "sparse")
        set(is_sparse true)
      endif()
      foreach(kind IN LISTS ${${tiles}})
        if(kind IN_LIST wanted)
          set(source ${MARLIN_GENERATED_DIR}/cuda/${name}_${tiles}_${kind}.cu)
          configure_file(${directory}/plan/instance.cu.in ${source} @ONLY)
          if(MARLIN_WERROR AND name STREQUAL "PersistentKernels")
            # Its registers are dealt to two kinds of warps by hand.
            set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS
              "-Xptxas=--warn-on-spills,--warning-as-error")
          endif()
          if(macro STREQUAL "MARLIN_HOPPER_INSTANCES")
            list(APPEND hopper_sources ${source})
          else()
            list(APPEND sources ${source})
          endif()
        endif()
      endforeach()
    endforeach()
  endforeach()
  set(${output} ${sources} PARENT_SCOPE)
  set(${hopper_output} ${hopper_sources} PARENT_SCOPE)
  set(bits 0)
  foreach(kind IN LISTS wanted)
    list(FIND kAll ${kind} number)
    math(EXPR bits "${bits} | (1 << ${number})")
  endforeach()
  set(MARLIN_CUDA_KIND_BITS ${bits} PARENT_SCOPE)
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
