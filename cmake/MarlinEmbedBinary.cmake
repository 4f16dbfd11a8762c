# cmake -DBINARY=file -DTEMPLATE=file.cc.in -DSOURCE=file.cc -P this: generates a source with the
# bytes of a file in place of @MARLIN_LIBRARY_BYTES@.
file(READ ${BINARY} hexadecimal HEX)
string(REGEX REPLACE "(..)" "0x\\1," MARLIN_LIBRARY_BYTES "${hexadecimal}")
string(REGEX REPLACE "(................................................................................)"
       "\\1\n" MARLIN_LIBRARY_BYTES "${MARLIN_LIBRARY_BYTES}")
configure_file(${TEMPLATE} ${SOURCE} @ONLY)
