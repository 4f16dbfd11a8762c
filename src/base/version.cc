#include "marlin/version.h"

#define MARLIN_TEXT_OF(text) #text
#define MARLIN_TEXT(macro) MARLIN_TEXT_OF(macro)

namespace marlin {

const char* Version() {
  return MARLIN_TEXT(MARLIN_VERSION_MAJOR) "." MARLIN_TEXT(MARLIN_VERSION_MINOR) "." MARLIN_TEXT(
      MARLIN_VERSION_PATCH);
}

}  // namespace marlin
