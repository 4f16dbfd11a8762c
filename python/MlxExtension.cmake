# MARLIN_MLX=AUTO builds the extension module _mlx if the target Python has MLX (`pip install
# --no-build-isolation`), and says why not if it is missing; ON requires it.
set(MARLIN_MLX AUTO CACHE STRING "Build the primitive of MLX: ON, OFF or AUTO (when MLX is installed)")
set_property(CACHE MARLIN_MLX PROPERTY STRINGS AUTO ON OFF)
set(MLX_FOUND OFF)
if(NOT MARLIN_MLX STREQUAL "OFF")
  execute_process(COMMAND ${Python_EXECUTABLE} -m mlx --cmake-dir OUTPUT_VARIABLE mlx_folder
                  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  execute_process(COMMAND ${Python_EXECUTABLE} -m mlx --version OUTPUT_VARIABLE mlx_version
                  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(mlx_folder)
    find_package(MLX CONFIG QUIET PATHS ${mlx_folder} NO_DEFAULT_PATH)
  endif()
  if(MARLIN_MLX STREQUAL "ON" AND NOT MLX_FOUND)
    message(FATAL_ERROR "MARLIN_MLX=ON, but ${Python_EXECUTABLE} has no MLX with CMake files")
  endif()
endif()
if(NOT MLX_FOUND)
  message(STATUS "MLX extension: OFF (no MLX for ${Python_EXECUTABLE})")
  return()
endif()
message(STATUS "MLX extension: ON (MLX ${mlx_version})")

set(gpu product_no_gpu)
if(MLX_BUILD_METAL)
  set(gpu product_gpu experts_gpu look_up_gpu launches_gpu gpu_memory gpu_buffer)
endif()
# MLX's types are in a nanobind domain of their own.
list(TRANSFORM gpu REPLACE "(.+)" "src/mlx/\\1.cc")
nanobind_add_module(_mlx NB_STATIC NB_DOMAIN mlx src/mlx/module.cc src/mlx/product.cc
                    src/mlx/experts.cc src/mlx/look_up.cc src/mlx/types.cc ${gpu})
target_link_libraries(_mlx PRIVATE mlx marlin_warnings)
target_include_directories(_mlx PRIVATE src ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
target_include_directories(_mlx SYSTEM PRIVATE ${NB_DIR}/include ${MLX_INCLUDE_DIRS})
set_target_properties(_mlx PROPERTIES CXX_VISIBILITY_PRESET hidden)
# Read before the module is loaded, because loading it into another version of MLX could crash.
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/_mlx_version.txt "${mlx_version}\n")
add_dependencies(python_package _mlx)
install(TARGETS _mlx LIBRARY DESTINATION metal_marlin COMPONENT python EXCLUDE_FROM_ALL)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/_mlx_version.txt DESTINATION metal_marlin COMPONENT python
        EXCLUDE_FROM_ALL)
