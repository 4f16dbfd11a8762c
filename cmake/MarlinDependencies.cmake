# The header libraries that the sources include: from third_party/include, where tools/wheel.py puts
# them in a source distribution, or from the system.
set(MARLIN_BUNDLED_HEADERS ${PROJECT_SOURCE_DIR}/third_party/include)
find_package(Threads REQUIRED)

# marlin_find_installed(): finds the libraries that the system has, and says what installs the others.
# tools/bundled.py reads the rows: CMake's name, a header, Debian's package, Homebrew's.
set(MARLIN_HEADER_LIBRARIES
    "fmt fmt/core.h libfmt-dev fmt"
    "nlohmann_json nlohmann/json.hpp nlohmann-json3-dev nlohmann-json"
    "Eigen3 Eigen/Core libeigen3-dev eigen"
    "CLI11 CLI/CLI.hpp libcli11-dev cli11"
    "xxHash xxhash.h libxxhash-dev xxhash")
macro(marlin_find_installed)
  set(missing "")
  set(apt "")
  set(brew "")
  foreach(row IN LISTS MARLIN_HEADER_LIBRARIES)
    string(REPLACE " " ";" row "${row}")
    list(POP_FRONT row library header debian homebrew)
    set(found OFF)
    if(library STREQUAL "xxHash")
      # Its headers suffice, and some distributions have no more.
      find_path(MARLIN_XXHASH_INCLUDE_DIR ${header})
      mark_as_advanced(MARLIN_XXHASH_INCLUDE_DIR)
      set(found ${MARLIN_XXHASH_INCLUDE_DIR})
    elseif(library STREQUAL "CLI11" AND NOT (MARLIN_BUILD_CLI OR MARLIN_BUILD_FUZZERS))
      continue()
    else()
      find_package(${library} QUIET NO_MODULE)
      set(found ${${library}_FOUND})
    endif()
    if(NOT found)
      string(APPEND missing " ${library}")
      string(APPEND apt " ${debian}")
      string(APPEND brew " ${homebrew}")
    endif()
  endforeach()
  if(missing)
    message(FATAL_ERROR "Headers that metal-marlin is compiled with were not found:${missing}. "
                        "Install them: apt-get install${apt} (Debian, Ubuntu) or brew install${brew} "
                        "(macOS). A source distribution made by ./dev wheel contains them.")
  endif()
endmacro()

if(EXISTS ${MARLIN_BUNDLED_HEADERS})
  message(STATUS "Header libraries: those in third_party/")
  foreach(target fmt::fmt fmt::fmt-header-only nlohmann_json::nlohmann_json Eigen3::Eigen CLI11::CLI11)
    add_library(${target} INTERFACE IMPORTED)
    target_include_directories(${target} SYSTEM INTERFACE ${MARLIN_BUNDLED_HEADERS})
  endforeach()
  foreach(target fmt::fmt fmt::fmt-header-only)
    target_compile_definitions(${target} INTERFACE FMT_HEADER_ONLY=1)
  endforeach()
else()
  marlin_find_installed()
endif()
set(MARLIN_FMT fmt::fmt)
if(MARLIN_FMT_HEADER_ONLY)
  set(MARLIN_FMT fmt::fmt-header-only)
endif()
