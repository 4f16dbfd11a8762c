# The warnings of every target of the project.
add_library(marlin_warnings INTERFACE)
set(cxx "$<COMPILE_LANGUAGE:CXX>")
target_compile_options(marlin_warnings INTERFACE
                       "$<${cxx}:-Wall;-Wextra;-Wconversion;-Wshadow;$<$<BOOL:${MARLIN_WERROR}>:-Werror>>")
# Strict IEEE: no contraction to FMA unless the source says fma, because the result of an expression
# would depend on the compiler.
target_compile_options(marlin_warnings INTERFACE "$<${cxx}:-ffp-contract=off;-fno-math-errno>")
