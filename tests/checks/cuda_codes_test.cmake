# cmake -P: what is compiled for which GPU and toolkit (cmake/MarlinCudaCodes.cmake).
cmake_minimum_required(VERSION 3.22)
include(${CMAKE_CURRENT_LIST_DIR}/../../cmake/MarlinCudaCodes.cmake)

# The numbers of nvcc --list-gpu-code.
set(cuda_12_5 50 52 53 60 61 62 70 72 75 80 86 87 89 90)
set(cuda_12_8 ${cuda_12_5} 100 101 120)
set(cuda_13_0 75 80 86 87 88 89 90 100 103 110 120 121)

function(expect text)
  if(NOT text STREQUAL "${ARGN}")
    message(SEND_ERROR "expected '${text}', got '${ARGN}'")
  endif()
endfunction()

marlin_known_rows(rows ${cuda_12_5})
expect("80-real;89-real;90a-real;90-virtual" ${rows})
foreach(known IN ITEMS cuda_12_8 cuda_13_0)
  marlin_known_rows(rows ${${known}})
  expect("80-real;89-real;90a-real;100;120-real" ${rows})
endforeach()

foreach(pair IN ITEMS "80 80-real" "86 80-real" "87 80-real" "89 89-real" "90 90a-real"
                      "100 100-real" "103 100-real" "110 110-real" "120 120-real" "121 120-real"
                      "130 90-virtual")
  string(REPLACE " " ";" pair ${pair})
  list(POP_FRONT pair gpu wanted)
  marlin_rows_for_gpu(rows ${gpu} ${cuda_13_0})
  expect(${wanted} ${rows})
endforeach()
foreach(gpu IN ITEMS 100 120)
  marlin_rows_for_gpu(rows ${gpu} ${cuda_12_5})
  expect("90-virtual" ${rows})
endforeach()

marlin_usable_codes(codes 70 75-real 80 90 86-real)
expect("80;90a-real;90-virtual;86-real" ${codes})
marlin_usable_codes(codes 90-real 90a-real 90a-virtual)
expect("90a-real;90a-virtual" ${codes})
marlin_usable_codes(codes 75)
expect("" ${codes})

marlin_forced_code_flags(flags 80 90)
expect("-gencode=arch=compute_80,code=sm_90" ${flags})
marlin_forced_code_flags(flags 80 80 89)
expect("-gencode=arch=compute_80,code=sm_80;-gencode=arch=compute_80,code=sm_89" ${flags})

marlin_code_names(names 80-real 90a-real 90-virtual 100 120-real)
expect("8.0, 9.0a, PTX of 9.0, 10.0 with PTX, 12.0" ${names})
