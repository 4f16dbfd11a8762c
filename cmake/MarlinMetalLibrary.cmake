# cmake "-DOBJECTS=a.air;b.air" -DLIBRARY=file.metallib -P this: links Metal objects. If one is empty,
# since its source did not compile, so is the library.
set(refused "")
foreach(object IN LISTS OBJECTS)
  file(SIZE ${object} bytes)
  if(bytes EQUAL 0)
    get_filename_component(name ${object} NAME_WE)
    list(APPEND refused ${name}.metal)
  endif()
endforeach()
if(NOT refused)
  execute_process(COMMAND xcrun -sdk macosx metallib ${OBJECTS} -o ${LIBRARY}
                  RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT result EQUAL 0)
    set(refused "metallib: ${text}")
  endif()
endif()
if(refused)
  message("Metal: the compiler refuses ${refused} (its messages are in *.air.log): all kernels are "
          "compiled at run time instead")
  file(WRITE ${LIBRARY} "")
endif()
