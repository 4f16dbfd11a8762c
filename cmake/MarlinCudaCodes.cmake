# The compute capabilities that CUDA kernels are compiled for. Functions without side effects;
# tests/checks/cuda_codes_test.cmake calls them.

# A row per code that differs: 8.6 to 8.8 run 8.0's, 10.3 runs 10.0's, and 12.1 runs 12.0's.
# Hopper's own kernels need 9.0a. The PTX of 10.0 is for what comes later, and for 11.0.
set(MARLIN_CUDA_ROWS 80-real 89-real 90a-real 100 120-real)

# marlin_known_rows(output known...): the rows that a toolkit can compile, given the numbers of
# `nvcc --list-gpu-code`: up to 9.0a before CUDA 12.8, with its PTX for later devices.
function(marlin_known_rows output)
  set(rows)
  foreach(row IN LISTS MARLIN_CUDA_ROWS)
    string(REGEX MATCH "^[0-9]+" number ${row})
    if(number IN_LIST ARGN)
      list(APPEND rows ${row})
    endif()
  endforeach()
  if(NOT "100" IN_LIST rows)
    list(APPEND rows 90-virtual)
  endif()
  set(${output} "${rows}" PARENT_SCOPE)
endfunction()

# marlin_rows_for_gpu(output gpu known...): what is compiled for a GPU: the latest row that it runs,
# its own code where no row does, or PTX if the toolkit is older than the GPU.
function(marlin_rows_for_gpu output gpu)
  math(EXPR major "${gpu} / 10")
  set(best)
  foreach(row IN LISTS MARLIN_CUDA_ROWS)
    string(REGEX MATCH "^[0-9]+" number ${row})
    math(EXPR row_major "${number} / 10")
    if(row_major EQUAL major AND NOT number GREATER gpu AND number IN_LIST ARGN)
      string(REGEX REPLACE "^([0-9]+a?).*" "\\1-real" best ${row})
    endif()
  endforeach()
  if(NOT best AND gpu IN_LIST ARGN)
    set(best ${gpu}-real)
  elseif(NOT best)
    set(best 90-virtual)
  endif()
  set(${output} "${best}" PARENT_SCOPE)
endfunction()

# marlin_usable_codes(output codes...): a user's CMAKE_CUDA_ARCHITECTURES without what is below 8.0,
# and with 9.0a for 9.0, whose code lacks Hopper's own kernels.
function(marlin_usable_codes output)
  set(codes)
  foreach(code IN LISTS ARGN)
    string(REGEX MATCH "^[0-9]+" number ${code})
    if(number LESS 80)
      continue()
    elseif(code STREQUAL "90-real")
      set(code 90a-real)
    elseif(code STREQUAL "90")
      set(code 90a-real 90-virtual)
    endif()
    list(APPEND codes ${code})
  endforeach()
  list(REMOVE_DUPLICATES codes)
  set(${output} "${codes}" PARENT_SCOPE)
endfunction()

# marlin_forced_code_flags(output capability gpus...): nvcc's flags for the code of `capability` on
# each of the GPUs, which must not be older.
function(marlin_forced_code_flags output capability)
  set(flags)
  foreach(gpu IN LISTS ARGN)
    if(NOT capability MATCHES "^[0-9]+$" OR capability LESS 80 OR capability GREATER gpu)
      message(FATAL_ERROR "MARLIN_CUDA_ARCH: expected a number from 80 to ${gpu}, got '${capability}'")
    endif()
    list(APPEND flags "-gencode=arch=compute_${capability},code=sm_${gpu}")
  endforeach()
  set(${output} "${flags}" PARENT_SCOPE)
endfunction()

# marlin_code_names(output codes...): for people: "8.0, 9.0a, 10.0 with PTX, PTX of 9.0".
function(marlin_code_names output)
  set(names)
  foreach(code IN LISTS ARGN)
    string(REGEX REPLACE "^([0-9]+)([0-9])([a-z]?).*" "\\1.\\2\\3" name ${code})
    if(code MATCHES "-virtual$")
      set(name "PTX of ${name}")
    elseif(NOT code MATCHES "-real$")
      string(APPEND name " with PTX")
    endif()
    list(APPEND names ${name})
  endforeach()
  list(JOIN names ", " names)
  set(${output} "${names}" PARENT_SCOPE)
endfunction()
