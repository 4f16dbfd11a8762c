// The marks that rows of logits have instead of tokens (plan/step/sample_marks.h). Compiles as
// C++20 and as Metal Shading Language.
#ifndef MARLIN_PLAN_INTEGERS_TOKEN_MARKS_H_
#define MARLIN_PLAN_INTEGERS_TOKEN_MARKS_H_

#include "plan/integers/both_languages.h"

namespace marlin {

MARLIN_SHARED MARLIN_INT32 kNoToken = -1;      ///< None was sampled.
MARLIN_SHARED MARLIN_INT32 kNoLogitMark = -2;  ///< Minus infinity for every token.
MARLIN_SHARED MARLIN_INT32 kMaskMark = -3;     ///< Minus infinity for every token that is allowed.
/// Not sampled, since a row before had another token than its draft; no error.
MARLIN_SHARED MARLIN_INT32 kSkippedMark = -4;
MARLIN_SHARED MARLIN_INT32 kMaskRowMark = -5;  ///< The row's mask is none.
/// The mark of token t whose logit is NaN is this minus 2 t, of +infinity one less.
MARLIN_SHARED MARLIN_INT32 kLogitMark = -6;

MARLIN_INLINE MARLIN_INT32 LogitMark(MARLIN_INT32 token, bool infinite) {
  return kLogitMark - 2 * token - (infinite ? 1 : 0);
}

}  // namespace marlin
#endif  // MARLIN_PLAN_INTEGERS_TOKEN_MARKS_H_
