# Warnings that every target of the project is built with.
add_library(marlin_warnings INTERFACE)
set(cxx "$<COMPILE_LANGUAGE:CXX>")
target_compile_options(marlin_warnings INTERFACE
                       "$<${cxx}:-Wall;-Wextra;-Wconversion;-Wshadow;$<$<BOOL:${MARLIN_WERROR}>:-Werror>>")
# Strict IEEE: a product is contracted to an FMA only where the source says so, or the results of
# one expression would depend on the compiler.
target_compile_options(marlin_warnings INTERFACE "$<${cxx}:-ffp-contract=off;-fno-math-errno>")
