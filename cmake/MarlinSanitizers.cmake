# MARLIN_SANITIZE=address;undefined builds everything with those sanitizers; a report ends the run.
set(MARLIN_SANITIZE "" CACHE STRING "Sanitizers for all targets: address;undefined, thread, memory")
if(MARLIN_BUILD_FUZZERS)
  # The fuzzer follows the branches that it reaches in all code, not in its own entry alone.
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
if(MARLIN_SANITIZE)
  list(JOIN MARLIN_SANITIZE "," sanitizers)
  add_compile_options(-fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${sanitizers})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # g++ takes the sanitizers' own checks for uses of uninitialised values (in <regex>, <variant>).
    add_compile_options(-Wno-maybe-uninitialized)
  endif()
endif()
