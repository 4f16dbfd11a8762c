# marlin_embed_files(output TEMPLATE DIRECTORY SUBFOLDER PREFIX): a source made of TEMPLATE (a
# *.cc.in) that holds every file of DIRECTORY/SUBFOLDER as text, made anew when one changes. Paths
# are relative to the subfolder, behind PREFIX.
function(marlin_embed_files output template directory prefix)
  file(GLOB_RECURSE files CONFIGURE_DEPENDS RELATIVE ${directory} ${directory}/*)
  list(SORT files)
  set(entries "")
  foreach(file IN LISTS files)
    file(READ ${directory}/${file} text)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${directory}/${file})
    string(APPEND entries "    {\"${prefix}${file}\", R\"file(${text})file\"},\n")
  endforeach()
  set(MARLIN_EMBEDDED_FILES "${entries}")
  get_filename_component(name ${template} NAME_WLE)
  set(source ${MARLIN_GENERATED_DIR}/metal/${name})
  configure_file(${template} ${source} @ONLY)
  set(${output} ${source} PARENT_SCOPE)
endfunction()
