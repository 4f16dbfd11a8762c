# MARLIN_METAL=AUTO builds the driver for Apple GPUs on macOS if it finds the headers of metal-cpp,
# and reports why if not; ON requires it. On other systems the headers are used to test that driver.
# They are searched for in MARLIN_METAL_CPP_DIR (cache variable, else environment variable), in
# build/metal_cpp (where tools/get_metal_cpp.py puts them), in the usual folders, and in an
# installed MLX. On macOS, unless MARLIN_METAL_CPP_FETCH is off, that script then gets them, so that
# `pip install .` has the device, too.
set(MARLIN_METAL AUTO CACHE STRING
    "Build the driver for Apple GPUs: ON, OFF or AUTO (on macOS, when metal-cpp is found)")
set_property(CACHE MARLIN_METAL PROPERTY STRINGS AUTO ON OFF)
set(MARLIN_METAL_CPP_DIR "" CACHE PATH "The folder that holds metal-cpp's Metal/Metal.hpp")

option(MARLIN_METAL_CPP_FETCH "On macOS, download metal-cpp's headers where they are not found" ON)
set(MARLIN_METAL_SCRIPTS ${CMAKE_CURRENT_LIST_DIR})

# marlin_find_metal_cpp(HINTS...): sets MARLIN_METAL_CPP_INCLUDE_DIR in the cache.
function(marlin_find_metal_cpp)
  set(CMAKE_FIND_FRAMEWORK NEVER)  # Metal.framework has a folder Metal without this header.
  find_path(MARLIN_METAL_CPP_INCLUDE_DIR Metal/Metal.hpp
            HINTS ${MARLIN_METAL_CPP_DIR} $ENV{MARLIN_METAL_CPP_DIR} ${CMAKE_BINARY_DIR}/metal_cpp
            PATHS ${ARGN} /opt/homebrew/include /usr/local/include
            PATH_SUFFIXES metal-cpp metal_cpp)
  mark_as_advanced(MARLIN_METAL_CPP_INCLUDE_DIR)
endfunction()

file(GLOB installed_mlx ${PROJECT_SOURCE_DIR}/.venv*/lib/python3*/site-packages/mlx/include/metal_cpp)
if(NOT MARLIN_METAL STREQUAL "OFF" AND NOT MARLIN_METAL_CPP_INCLUDE_DIR)
  find_package(Python3 3.9 QUIET COMPONENTS Interpreter)
  if(Python3_Interpreter_FOUND)
    # find_spec finds the folder without importing the package.
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c
              "import importlib.util as u; s = u.find_spec('mlx'); print(';'.join(p + '/include/metal_cpp' for p in (s.submodule_search_locations or []) if s))"
      OUTPUT_VARIABLE python_mlx OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    list(APPEND installed_mlx ${python_mlx})
  endif()
  marlin_find_metal_cpp(${installed_mlx})
  if(NOT MARLIN_METAL_CPP_INCLUDE_DIR AND MARLIN_METAL_CPP_FETCH AND Python3_Interpreter_FOUND
     AND CMAKE_SYSTEM_NAME STREQUAL "Darwin" AND PROJECT_IS_TOP_LEVEL)
    message(STATUS "Metal: getting metal-cpp (tools/get_metal_cpp.py)")
    execute_process(
      COMMAND ${Python3_EXECUTABLE} ${MARLIN_METAL_SCRIPTS}/../tools/get_metal_cpp.py
              ${CMAKE_BINARY_DIR}/metal_cpp)
    marlin_find_metal_cpp()
  endif()
endif()

set(MARLIN_HAVE_METAL OFF)
if(MARLIN_METAL STREQUAL "OFF")
  set(why "switched off")
elseif(NOT CMAKE_SYSTEM_NAME STREQUAL "Darwin")
  set(why "only for macOS")
elseif(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  set(why "metal-cpp needs blocks, which only clang has")
elseif(NOT MARLIN_METAL_CPP_INCLUDE_DIR)
  set(why "metal-cpp was not found: tools/get_metal_cpp.py FOLDER gets it; set MARLIN_METAL_CPP_DIR to the folder")
else()
  set(MARLIN_HAVE_METAL ON)
endif()
if(MARLIN_METAL STREQUAL "ON" AND NOT MARLIN_HAVE_METAL)
  message(FATAL_ERROR "MARLIN_METAL=ON: ${why}")
endif()
set(MARLIN_METAL_WHY "${why}")  # The device "metal" says it.
if(MARLIN_HAVE_METAL)
  message(STATUS "Metal: ON (metal-cpp in ${MARLIN_METAL_CPP_INCLUDE_DIR})")
elseif(CMAKE_SYSTEM_NAME STREQUAL "Darwin" AND PROJECT_IS_TOP_LEVEL)
  message(WARNING "Metal: OFF (${why}). This build runs on the CPU alone: it leaves out the "
                  "device \"metal\".")
else()
  message(STATUS "Metal: OFF (${why})")
endif()

# marlin_metal_cpp_objects(output SOURCES... INCLUDES folders...): compiles sources that include
# metal-cpp to objects for Linux, with a clang that supports blocks (MARLIN_BLOCKS_CLANG), whatever
# compiler the rest of the build uses. INCLUDES names the folder of stand-ins for Apple's headers.
function(marlin_metal_cpp_objects output)
  cmake_parse_arguments(arg "" "" "SOURCES;INCLUDES" ${ARGN})
  set(includes "")
  set(werror "")
  if(MARLIN_WERROR)
    set(werror -Werror)
  endif()
  foreach(folder IN LISTS arg_INCLUDES)
    list(APPEND includes -isystem ${folder})
  endforeach()
  set(objects "")
  foreach(source IN LISTS arg_SOURCES)
    get_filename_component(object ${source} NAME_WE)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/${object}.o)
    add_custom_command(
      OUTPUT ${object}
      COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${MARLIN_BLOCKS_CLANG} -std=c++20 -fblocks -O1 -g -Wall
              -Wextra -Wconversion -Wshadow ${werror} -ffp-contract=off
              -DMETALCPP_SYMBOL_VISIBILITY_HIDDEN -D__MAC_OS_X_VERSION_MIN_REQUIRED=140000
              -I${PROJECT_SOURCE_DIR}/src -I${PROJECT_SOURCE_DIR}/include
              -I${PROJECT_SOURCE_DIR}/python/src ${includes}
              -isystem ${MARLIN_METAL_CPP_INCLUDE_DIR} -MD -MF ${object}.d -c ${source} -o ${object}
      DEPENDS ${source} DEPFILE ${object}.d
      COMMENT "Compiling for a stand-in of an Apple GPU: ${source}" VERBATIM)
    list(APPEND objects ${object})
  endforeach()
  set(${output} ${objects} PARENT_SCOPE)
endfunction()

# marlin_metal_library(output KERNEL_FOLDER): generates a source that embeds a metallib of all
# kernels, compiled by Xcode. Without that compiler (the command line tools lack it), or if it
# refuses one of them, the source embeds none, and the driver compiles the kernels at run time: then
# only what uses the refused one fails, with the compiler's message.
function(marlin_metal_library output folder)
  set(source ${MARLIN_GENERATED_DIR}/metal/built_library.cc)
  set(template ${MARLIN_METAL_SCRIPTS}/../src/backends/metal/apple/built_library.cc.in)
  set(${output} ${source} PARENT_SCOPE)
  set(compile xcrun -sdk macosx metal -std=metal3.1 -fno-fast-math -mmacosx-version-min=14.0 -O2)
  set(probe ${CMAKE_CURRENT_BINARY_DIR}/kernels/probe.metal)
  file(WRITE ${probe} "[[kernel]] void probe() {}\n")
  execute_process(COMMAND ${compile} -c ${probe} -o ${probe}.air RESULT_VARIABLE result
                  OUTPUT_QUIET ERROR_QUIET)
  if(NOT result EQUAL 0)
    message(STATUS "Metal: no compiler for kernels (xcrun metal); they are compiled at run time")
    set(MARLIN_LIBRARY_BYTES "")
    configure_file(${template} ${source} @ONLY)
    return()
  endif()
  file(GLOB_RECURSE kernels CONFIGURE_DEPENDS ${folder}/*.metal)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS ${folder}/*.h ${PROJECT_SOURCE_DIR}/src/plan/integers/*.h)
  set(objects "")
  foreach(kernel IN LISTS kernels)
    get_filename_component(name ${kernel} NAME_WE)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/kernels/${name}.air)
    add_custom_command(
      OUTPUT ${object}
      COMMAND ${CMAKE_COMMAND} -DSOURCE=${kernel} -DOBJECT=${object}
              "-DCOMPILE=${compile};-I;${PROJECT_SOURCE_DIR}/src"
              -P ${MARLIN_METAL_SCRIPTS}/MarlinMetalKernel.cmake
      DEPENDS ${kernel} ${headers} ${MARLIN_METAL_SCRIPTS}/MarlinMetalKernel.cmake
      COMMENT "Compiling ${name}.metal" VERBATIM)
    list(APPEND objects ${object})
  endforeach()
  set(library ${CMAKE_CURRENT_BINARY_DIR}/kernels/marlin.metallib)
  set(link ${MARLIN_METAL_SCRIPTS}/MarlinMetalLibrary.cmake)
  set(embed ${MARLIN_METAL_SCRIPTS}/MarlinEmbedBinary.cmake)
  add_custom_command(
    OUTPUT ${source}
    COMMAND ${CMAKE_COMMAND} "-DOBJECTS=${objects}" -DLIBRARY=${library} -P ${link}
    COMMAND ${CMAKE_COMMAND} -DBINARY=${library} -DTEMPLATE=${template} -DSOURCE=${source}
            -P ${embed}
    DEPENDS ${objects} ${template} ${link} ${embed}
    COMMENT "Linking marlin.metallib" VERBATIM)
endfunction()
