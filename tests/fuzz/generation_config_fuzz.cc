// generation_config.json: the end tokens that are read from it are always token ids.
#include "fuzz_target.h"
#include "model/decoder_config.h"

namespace {

constexpr std::string_view kConfig =
    R"({"model_type":"llama","hidden_size":32,"intermediate_size":64,"num_hidden_layers":1,)"
    R"("num_attention_heads":2,"vocab_size":64,"eos_token_id":7})";

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto decoder = marlin::ReadDecoderConfig(kConfig, marlin::TextOf(data, size));
  if (!decoder.ok()) {
    marlin::CheckError(decoder.status());
    return 0;
  }
  // Falls back to those of config.json.
  MARLIN_FUZZ_CHECK(!decoder->eos_token_ids.empty());
  MARLIN_FUZZ_CHECK(decoder->eos_token_ids.size() <= size + 1);
  for (const int32_t token : decoder->eos_token_ids) MARLIN_FUZZ_CHECK(token >= 0);
  return 0;
}
