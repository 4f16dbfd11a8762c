# Cross build for 64-bit Arm on Debian (g++-aarch64-linux-gnu); programs run under qemu-user.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu)
# Header-only packages come from the host; libraries never do.
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(MARLIN_FMT_HEADER_ONLY ON CACHE BOOL "")
set(fmt_DIR /usr/lib/${CMAKE_HOST_SYSTEM_PROCESSOR}-linux-gnu/cmake/fmt CACHE PATH "")
