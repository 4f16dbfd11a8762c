// generation_config.json: the end tokens that are read from it are always token ids, and the
// sampling is one that a sampler takes.
#include "fuzz_target.h"
#include "model/decoder_config.h"

namespace {

constexpr std::string_view kConfig =
    R"({"model_type":"llama","hidden_size":32,"intermediate_size":64,"num_hidden_layers":1,)"
    R"("num_attention_heads":2,"vocab_size":64,"eos_token_id":7})";

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  marlin::GenerationFiles files;
  files.generation_config = marlin::TextOf(data, size);
  const auto decoder = marlin::ReadDecoderConfig(kConfig, files);
  if (!decoder.ok()) {
    marlin::CheckError(decoder.status());
    return 0;
  }
  const marlin::GenerationDefaults& defaults = decoder->generation;
  // That of config.json is one of them.
  MARLIN_FUZZ_CHECK(!defaults.eos_token_ids.empty());
  MARLIN_FUZZ_CHECK(defaults.eos_token_ids.size() <= size + 1);
  for (const int32_t token : defaults.eos_token_ids) MARLIN_FUZZ_CHECK(token >= 0);
  MARLIN_FUZZ_CHECK(defaults.sampling.temperature >= 0 && defaults.sampling.top_k >= 0);
  MARLIN_FUZZ_CHECK(defaults.sampling.top_p > 0 && defaults.sampling.top_p <= 1);
  return 0;
}
