// Metal sources for the simulator, preprocessed: tokens and line numbers are preserved. Nothing is
// compiled or run.
#include <algorithm>

#include "backends/metal/runtime/simulator.h"
#include "fuzz_target.h"
#include "metal_sim/msl_lexer.h"
#include "metal_sim/msl_rewriter.h"
#include "metal_sim/msl_source.h"

namespace {

using namespace marlin;
using namespace metal_sim;

int64_t Lines(std::string_view text) { return std::count(text.begin(), text.end(), '\n'); }

void CheckTokens(std::string_view text) {
  const auto tokens = LexMetal(text);
  if (!tokens.ok()) return CheckError(marlin::metal::FromSimulator(tokens.status()));
  const char* end = text.data();
  for (const Token& token : *tokens) {
    if (token.kind == TokenKind::kEnd) continue;
    MARLIN_FUZZ_CHECK(!token.text.empty() && token.text.data() >= end);
    end = token.text.data() + token.text.size();
    MARLIN_FUZZ_CHECK(end <= text.data() + text.size());
  }
}

void CheckSource(std::string_view text) {
  const auto source = MslSource::Parse(text);
  if (!source.ok()) return CheckError(marlin::metal::FromSimulator(source.status()));
  for (size_t i = 0; i < source->size(); ++i) {
    const size_t partner = source->Partner(i);
    MARLIN_FUZZ_CHECK(partner < source->size() && source->Partner(partner) == i);
    const size_t around = source->Enclosing(i);
    MARLIN_FUZZ_CHECK(around == kNoToken || (around < i && source->Partner(around) > i));
  }
  MARLIN_FUZZ_CHECK(Lines(source->Print()) == Lines(text));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = TextOf(data, size);
  CheckTokens(text);
  CheckSource(text);
  for (const RewritePurpose purpose : {RewritePurpose::kRun, RewritePurpose::kTypeCheck}) {
    const auto rewritten = RewriteMetal(text, purpose);
    if (!rewritten.ok()) {
      CheckError(marlin::metal::FromSimulator(rewritten.status()));
      continue;
    }
    for (const KernelEntry& kernel : rewritten->kernels) {
      MARLIN_FUZZ_CHECK(!kernel.name.empty() && !kernel.expression.empty());
    }
    MARLIN_FUZZ_CHECK(Lines(rewritten->text) >= Lines(text));
  }
  return 0;
}
