# metal_sim_embed_files(OUTPUT TEMPLATE DIRECTORY PREFIX [DIRECTORY PREFIX]...): makes the source
# OUTPUT of TEMPLATE (a *.cc.in), which holds every file of the directories as text in the place of
# @METAL_SIM_EMBEDDED_FILES@, and again when one of them changes. Paths are relative to the
# directory, after PREFIX.
function(metal_sim_embed_files output template)
  set(entries "")
  while(ARGN)
    list(POP_FRONT ARGN directory prefix)
    file(GLOB_RECURSE files CONFIGURE_DEPENDS RELATIVE ${directory} ${directory}/*)
    list(SORT files)
    foreach(file IN LISTS files)
      file(READ ${directory}/${file} text)
      set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${directory}/${file})
      string(APPEND entries "    {\"${prefix}${file}\", R\"file(${text})file\"sv},\n")
    endforeach()
  endwhile()
  set(METAL_SIM_EMBEDDED_FILES "${entries}")
  configure_file(${template} ${output} @ONLY)
endfunction()
