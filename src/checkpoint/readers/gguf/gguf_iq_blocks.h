// The block types of GGUF whose values are points of a grid: IQ1, IQ2 and IQ3.
#pragma once

#include "checkpoint/readers/gguf/gguf_blocks.h"

namespace marlin {

extern const GgufFormat kGgufIq2Xxs;
extern const GgufFormat kGgufIq2Xs;
extern const GgufFormat kGgufIq2S;
extern const GgufFormat kGgufIq3Xxs;
extern const GgufFormat kGgufIq3S;
extern const GgufFormat kGgufIq1S;
extern const GgufFormat kGgufIq1M;

}  // namespace marlin
