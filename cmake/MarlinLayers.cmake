# marlin_layer(name [CUDA] [SOURCES more...] [EXCLUDE name | ONLY name] [WITHOUT folders]
#              [LINK libs...]):
# an object library of the sources below one folder of src/: all, all but EXCLUDE, or ONLY one, and
# none of the folders WITHOUT, a regex. A CUDA layer also has *.cu files; without CUDA only its
# host-only files and without_cuda.cc are built.
set(MARLIN_AVX2_FLAGS -mavx2 -mfma -mf16c)
set(MARLIN_AVX512_FLAGS ${MARLIN_AVX2_FLAGS} -mavx512f -mavx512bw -mavx512dq -mavx512vl
    -mavx512vbmi -mavx512vbmi2 -mprefer-vector-width=512
    -Wno-uninitialized)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # g++ 12 reports the deliberately undefined operands inside its own intrinsics.
  list(APPEND MARLIN_AVX512_FLAGS -Wno-maybe-uninitialized)
endif()
set(MARLIN_VNNI_FLAGS ${MARLIN_AVX512_FLAGS} -mavx512vnni)
set(MARLIN_AVX512BF16_FLAGS ${MARLIN_AVX512_FLAGS} -mavx512bf16)
set(MARLIN_AMX_FLAGS ${MARLIN_AVX512BF16_FLAGS} -mamx-tile -mamx-bf16)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  set(MARLIN_X86 ON)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(MARLIN_ARM64 ON)
endif()

# The files of a CUDA layer that include no CUDA header; tools/check_layers.py reads this line.
set(MARLIN_CUDA_HOST_ONLY "/cuda/(layout|plan|libraries|tuning)/[^/]*\\.cc$|/cuda/.*_plan\\.cc$|/without_cuda\\.cc$")

# marlin_select_sources(variable): removes from a list of sources the files of instruction sets that
# the processor type lacks. Files named *_avx2.cc, *_avx512.cc, *_vnni.cc, *_avx512bf16.cc, *_amx.cc
# get the flags of their instruction set, and no other file does, so that one binary runs on every
# machine. They and *_scalar.cc, *_neon.cc get the flags of kernels, too.
function(marlin_select_sources variable)
  set(sources ${${variable}})
  if(NOT MARLIN_X86)
    list(FILTER sources EXCLUDE REGEX "_(avx2|avx512|vnni|avx512bf16|amx)\\.cc$")
  endif()
  if(NOT MARLIN_ARM64)
    list(FILTER sources EXCLUDE REGEX "_neon\\.cc$")
  endif()
  foreach(source IN LISTS sources)
    foreach(isa scalar neon avx2 avx512 vnni avx512bf16 amx)
      if(source MATCHES "_${isa}\\.cc$")
        string(TOUPPER ${isa} upper)
        set(flags ${MARLIN_${upper}_FLAGS} ${MARLIN_KERNEL_FLAGS})
        if(source MATCHES "/exact_" AND CMAKE_BUILD_TYPE STREQUAL "Release")
          # What is unrolled is so in the source. At -O3 the kernels take up to three times as long to
          # compile and have up to five times as many bytes.
          list(APPEND flags -O2)
        endif()
        set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${flags}"
                                    SKIP_UNITY_BUILD_INCLUSION ON)
      endif()
    endforeach()
  endforeach()
  set(${variable} ${sources} PARENT_SCOPE)
endfunction()

# Four fifths of a small source's compile time are its headers, so that sources are compiled in
# batches, each of which parses them once. Batches compile what they need from each other: nightly
# compiles every file alone.
option(MARLIN_UNITY "Compile sources in batches" ON)

# marlin_unity(target [batch size]): compiles the C++ sources of a target in batches.
function(marlin_unity target)
  set(size ${ARGN})
  if(NOT size)
    set(size 12)
  endif()
  # CMake 3.31 and later would batch CUDA sources, too, each of which takes long enough alone.
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cu$")
  if(sources)
    set_source_files_properties(${sources} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  endif()
  # Relocatable: from CMake 3.29 on, batches in other clones are the same text for a compiler cache.
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${MARLIN_UNITY}
                        UNITY_BUILD_BATCH_SIZE ${size} UNITY_BUILD_RELOCATABLE ON)
  if(MARLIN_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # g++ takes types in the anonymous namespace of an included file for those of a header.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
  endif()
endfunction()

# marlin_host_code(target): compiles a target that has no loop over weights at -O1, in two thirds of
# the time of -O3; with sanitizers at -O0, in half of the time of -O1.
function(marlin_host_code target)
  if(MARLIN_SANITIZE)
    target_compile_options(${target} PRIVATE -O0)
  else()
    target_compile_options(${target} PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O1>)
  endif()
endfunction()

# marlin_object_library(target sources...): compiles sources as those of src/ are.
function(marlin_object_library target)
  add_library(${target} OBJECT ${ARGN})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src
                             ${PROJECT_SOURCE_DIR}/include ${MARLIN_GENERATED_DIR})
  target_link_libraries(${target} PRIVATE marlin_warnings Threads::Threads ${MARLIN_FMT}
                        nlohmann_json::nlohmann_json)
  marlin_unity(${target})
endfunction()

# marlin_cuda_target(target): what sources that include CUDA's headers or kernels need.
function(marlin_cuda_target target)
  set(hopper 0)
  if(MARLIN_HOPPER_ARCHITECTURES)
    set(hopper 1)
  endif()
  target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${MARLIN_CUDA_FLAGS}>")
  target_compile_definitions(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:MARLIN_CUDA_KIND_BITS=${MARLIN_CUDA_KIND_BITS}>
    $<$<COMPILE_LANGUAGE:CXX>:MARLIN_CUDA_HOPPER=${hopper}>)
endfunction()

function(marlin_layer name)
  cmake_parse_arguments(arg "CUDA" "EXCLUDE;ONLY;WITHOUT" "SOURCES;LINK" ${ARGN})
  string(REPLACE "/" "_" target marlin_${name})
  set(folder ${CMAKE_CURRENT_SOURCE_DIR}/${name})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${folder}/*.cc)
  if(arg_WITHOUT)
    list(FILTER sources EXCLUDE REGEX "/src/${name}/(${arg_WITHOUT})/")
  endif()
  if(arg_CUDA AND MARLIN_HAVE_CUDA)
    file(GLOB_RECURSE device_sources CONFIGURE_DEPENDS ${folder}/*.cu)
    marlin_cuda_instances(instances hopper_instances ${folder})
    list(APPEND device_sources ${instances})
    list(FILTER sources EXCLUDE REGEX "/without_cuda\\.cc$")
  elseif(arg_CUDA)
    list(FILTER sources INCLUDE REGEX "${MARLIN_CUDA_HOST_ONLY}")
  endif()
  if(arg_CUDA)
    marlin_shipped_tuning(tuning ${folder})
    list(APPEND sources ${tuning})
  endif()
  if(arg_EXCLUDE)
    list(FILTER sources EXCLUDE REGEX "/${arg_EXCLUDE}\\.cc$")
  elseif(arg_ONLY)
    list(FILTER sources INCLUDE REGEX "/${arg_ONLY}\\.cc$")
  endif()
  list(APPEND sources ${arg_SOURCES})
  marlin_select_sources(sources)
  if(NOT sources)
    return()
  endif()
  marlin_object_library(${target} ${sources} ${device_sources})
  target_link_libraries(${target} PRIVATE ${arg_LINK})
  if(device_sources)
    marlin_cuda_target(${target})
    set_source_files_properties(${folder}/runtime/device_code.cu PROPERTIES COMPILE_DEFINITIONS
                                "MARLIN_CUDA_CODES=\"${MARLIN_CUDA_CODE_NAMES}\"")
    if(MARLIN_HOPPER_ARCHITECTURES)
      marlin_object_library(${target}_hopper ${hopper_instances})
      marlin_cuda_target(${target}_hopper)
      set_target_properties(${target}_hopper PROPERTIES CUDA_ARCHITECTURES
                            "${MARLIN_HOPPER_ARCHITECTURES}")
      set_property(GLOBAL APPEND PROPERTY MARLIN_LAYERS ${target}_hopper)
    endif()
  endif()
  set_property(GLOBAL APPEND PROPERTY MARLIN_LAYERS ${target})
endfunction()
