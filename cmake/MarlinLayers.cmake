# marlin_layer(name [MUTANTS] [CUDA] [SOURCES more...] [EXCLUDE name | ONLY name] [LINK libs...]):
# one object library per folder of src/, of all its sources, but one, or one alone; and with MUTANTS
# a second one whose seeded faults can be switched on (src/base/mutant.h). Files named
# *_avx2.cc, *_avx512.cc, *_amx.cc, *_neon.cc get the flags of their instruction set; nothing else
# does, so that one binary runs on every machine. A CUDA layer has *.cu files too, and where CUDA is
# not built only what needs no CUDA: the table of kernels, their plans and variants, measurements,
# what loads cuBLAS, and without_cuda.cc.
set(MARLIN_AVX2_FLAGS -mavx2 -mfma -mf16c)
set(MARLIN_AVX512_FLAGS ${MARLIN_AVX2_FLAGS} -mavx512f -mavx512bw -mavx512dq -mavx512vl
    -mavx512vbmi -mprefer-vector-width=512
    -Wno-uninitialized)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # g++ 12 reports the deliberately undefined operands inside its own intrinsics.
  list(APPEND MARLIN_AVX512_FLAGS -Wno-maybe-uninitialized)
endif()
set(MARLIN_VNNI_FLAGS ${MARLIN_AVX512_FLAGS} -mavx512vnni)
set(MARLIN_AMX_FLAGS ${MARLIN_AVX512_FLAGS} -mavx512bf16 -mamx-tile -mamx-bf16)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  set(MARLIN_X86 ON)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(MARLIN_ARM64 ON)
endif()

# Of a CUDA layer what needs no CUDA.
set(MARLIN_CUDA_HOST_SOURCES
    without_cuda code_kind kernel_table gemv_plan plan_cache wgmma_plan block_plan fp8_plan
    tile_waves variants cublas_library)

function(marlin_layer name)
  cmake_parse_arguments(arg "MUTANTS;CUDA" "EXCLUDE;ONLY" "SOURCES;LINK" ${ARGN})
  string(REPLACE "/" "_" target marlin_${name})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${name}/*.cc)
  if(arg_CUDA AND MARLIN_HAVE_CUDA)
    file(GLOB device_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${name}/*.cu)
    marlin_cuda_instances(instances ${CMAKE_CURRENT_SOURCE_DIR}/${name})
    list(APPEND device_sources ${instances})
    list(FILTER sources EXCLUDE REGEX "/without_cuda\\.cc$")
  elseif(arg_CUDA)
    string(JOIN "|" names ${MARLIN_CUDA_HOST_SOURCES})
    list(FILTER sources INCLUDE REGEX "/(${names})\\.cc$")
  endif()
  if(arg_CUDA)
    marlin_shipped_tuning(tuning ${CMAKE_CURRENT_SOURCE_DIR}/${name})
    list(APPEND sources ${tuning})
  endif()
  if(arg_EXCLUDE)
    list(FILTER sources EXCLUDE REGEX "/${arg_EXCLUDE}\\.cc$")
  elseif(arg_ONLY)
    list(FILTER sources INCLUDE REGEX "/${arg_ONLY}\\.cc$")
  endif()
  list(APPEND sources ${arg_SOURCES})
  if(NOT MARLIN_X86)
    list(FILTER sources EXCLUDE REGEX "_(avx2|avx512|vnni|amx)\\.cc$")
  endif()
  if(NOT MARLIN_ARM64)
    list(FILTER sources EXCLUDE REGEX "_neon\\.cc$")
  endif()
  if(NOT sources)
    return()
  endif()
  set(targets ${target})
  if(arg_MUTANTS AND MARLIN_BUILD_TESTS)
    list(APPEND targets ${target}_mutants)
  endif()
  foreach(object_library IN LISTS targets)
    add_library(${object_library} OBJECT ${sources} ${device_sources})
    target_include_directories(${object_library} PRIVATE ${PROJECT_SOURCE_DIR}/src
                               ${PROJECT_SOURCE_DIR}/include ${MARLIN_GENERATED_DIR})
    target_link_libraries(${object_library} PRIVATE marlin_warnings Threads::Threads ${MARLIN_FMT}
                          nlohmann_json::nlohmann_json ${arg_LINK})
  endforeach()
  if(device_sources)
    target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${MARLIN_CUDA_FLAGS}>")
  endif()
  if(TARGET ${target}_mutants)
    set_target_properties(${target}_mutants PROPERTIES EXCLUDE_FROM_ALL ON)
    target_compile_definitions(${target}_mutants PRIVATE MARLIN_MUTANTS)
    # Faults do not depend on the optimisation, and this halves the time to compile them.
    target_compile_options(${target}_mutants PRIVATE -O1)
  endif()
  foreach(source IN LISTS sources)
    foreach(isa avx2 avx512 vnni amx)
      if(source MATCHES "_${isa}\\.cc$")
        string(TOUPPER ${isa} upper)
        set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${MARLIN_${upper}_FLAGS}")
      endif()
    endforeach()
  endforeach()
  set_property(GLOBAL APPEND PROPERTY MARLIN_LAYERS ${target})
endfunction()
