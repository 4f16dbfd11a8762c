// The mixers of mixers.def.
#include <algorithm>

#include "base/checked.h"
#include "model/mixer.h"

namespace marlin {

#define MARLIN_MIXER(Name) const Mixer& Name##Mixer();
#include "recipe/mixers.def"
#undef MARLIN_MIXER

const Mixer& MixerOf(MixerKind kind) {
  switch (kind) {
#define MARLIN_MIXER(Name) \
  case MixerKind::k##Name: \
    return Name##Mixer();
#include "recipe/mixers.def"
#undef MARLIN_MIXER
  }
  return AttentionMixer();
}

const MixerParameters& ParametersOf(MixerKind kind) { return MixerOf(kind); }

PassSetting SettingOf(const Device& device, const DecoderConfig& config,
                      const ModelOptions& options, DType cache_type) {
  PassSetting setting{device, config, cache_type};
  setting.accuracy = options.allow_bf16_activations ? Accuracy::kDefault : Accuracy::kExact;
  if (options.batch_invariant) setting.determinism = Determinism::kBatchInvariant;
  return setting;
}

int64_t MixerBytes(const PassSetting& setting, int64_t first) {
  const bool exact = setting.accuracy == Accuracy::kExact;
  Checked converted(0);
  int64_t expanded = 0;
  for (int64_t layer = first; layer < setting.config.shape.layers; ++layer) {
    const Mixer& mixer = MixerOf(setting.config.mixer(layer));
    converted = converted + Checked(mixer.ConvertedBytes(setting.config.layer(layer).sizes, exact));
    expanded = std::max(expanded, mixer.ExpandedBytes(setting));
  }
  return (converted + Checked(expanded)).Take().value_or(INT64_MAX);
}

}  // namespace marlin
