# cmake -DSOURCE=kernel.metal -DOBJECT=kernel.air "-DCOMPILE=command;and;options" -P this: compiles a
# Metal source. Its messages are printed, and kept in OBJECT.log. A source that does not compile
# leaves an empty object, and the build goes on (MarlinMetalLibrary.cmake).
execute_process(COMMAND ${COMPILE} -c ${SOURCE} -o ${OBJECT} RESULT_VARIABLE result
                OUTPUT_VARIABLE text ERROR_VARIABLE text)
file(WRITE ${OBJECT}.log "${text}")
if(text)
  message("${text}")
endif()
if(NOT result EQUAL 0)
  file(WRITE ${OBJECT} "")
endif()
