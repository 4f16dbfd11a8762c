# `cmake --install` installs the headers, the library, the command and the package for
# find_package(marlin).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS marlin EXPORT marlinTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/marlin DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

if(TARGET metal-marlin)
  install(TARGETS metal-marlin RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/marlin)
install(EXPORT marlinTargets NAMESPACE marlin:: DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/marlinConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
# Users of a static library link the CUDA runtime and Boost themselves; a shared library contains
# them.
set(MARLIN_NEEDS_CUDA OFF)
if(MARLIN_HAVE_CUDA AND NOT BUILD_SHARED_LIBS)
  set(MARLIN_NEEDS_CUDA ON)
endif()
set(MARLIN_NEEDS_BOOST OFF)
if(MARLIN_HAVE_METAL_SIM AND NOT BUILD_SHARED_LIBS)
  set(MARLIN_NEEDS_BOOST ON)
endif()
# pkg-config, for builds without CMake. The .pc file lists the dependencies of a static library too.
file(RELATIVE_PATH MARLIN_PREFIX_FROM_PC /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
set(MARLIN_PC_LIBRARIES "")
if(NOT BUILD_SHARED_LIBS)
  set(MARLIN_PC_LIBRARIES " -lfmt -lstdc++ -lm -lpthread")
  if(APPLE)
    set(MARLIN_PC_LIBRARIES " -lfmt -lc++ -framework Metal -framework Foundation")
    string(APPEND MARLIN_PC_LIBRARIES
           " -framework CoreGraphics -framework IOKit -framework CoreFoundation")
  endif()
  if(MARLIN_HAVE_METAL_SIM)
    string(APPEND MARLIN_PC_LIBRARIES " -lboost_context -l${CMAKE_DL_LIBS}")
  endif()
  if(MARLIN_HAVE_CUDA)
    string(APPEND MARLIN_PC_LIBRARIES " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -ldl")
  endif()
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/marlin.pc.in ${CMAKE_BINARY_DIR}/marlin.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/marlin.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
configure_file(${PROJECT_SOURCE_DIR}/cmake/marlinConfig.cmake
               ${CMAKE_BINARY_DIR}/marlinConfig.cmake @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/marlinConfig.cmake
        ${CMAKE_BINARY_DIR}/marlinConfigVersion.cmake DESTINATION ${package_dir})
