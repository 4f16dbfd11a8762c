// The results of bench/model.h as JSON and as text.
#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text_table.h"
#include "bench/document.h"
#include "bench/model.h"

namespace marlin::bench {
namespace {

/// {"seconds", "operations": [{"operation", "count", "seconds", "share"}]}
nlohmann::ordered_json ProfileJson(const ModelPhase& phase) {
  const double sum = phase.ProfileSeconds();
  nlohmann::ordered_json operations = nlohmann::ordered_json::array();
  for (const ProfileRow& row : phase.profile) {
    operations.push_back({{"operation", StepPartName(row.part)},
                          {"count", row.count},
                          {"seconds", row.seconds},
                          {"share", row.seconds / sum}});
  }
  return {{"seconds", sum}, {"operations", operations}};
}

}  // namespace

double ModelPhase::ProfileSeconds() const {
  double seconds = 0;
  for (const ProfileRow& row : profile) seconds += row.seconds;
  return seconds;
}

std::string ProfileText(const std::vector<ModelPhase>& phases) {
  std::string text;
  for (const ModelPhase& phase : phases) {
    if (phase.profile.empty()) continue;
    const double sum = phase.ProfileSeconds();
    Table table({"operation", "count", "us", "us each", "share"});
    for (const ProfileRow& row : phase.profile) {
      table.AddRow({std::string(StepPartName(row.part)), std::to_string(row.count),
                    fmt::format("{:.1f}", 1e6 * row.seconds),
                    fmt::format("{:.2f}", 1e6 * row.seconds / static_cast<double>(row.count)),
                    fmt::format("{:.1f} %", 100 * row.seconds / sum)});
    }
    text += fmt::format(
        "\n{}, batch {}, one operation at a time: {:.3f} ms; together {:.3f} ms\n\n{}",
        phase.Test(), phase.batch, 1e3 * sum, 1e3 * phase.timing.median, table.ToString());
  }
  return text;
}

std::string ModelPhase::Test() const {
  if (new_tokens == 0) return fmt::format("pp{}", prompt_tokens);
  return prompt_tokens == 0 ? fmt::format("tg{}", new_tokens)
                            : fmt::format("tg{} @ d{}", new_tokens, prompt_tokens);
}

double ModelPhase::Fraction(const MachineCeilings& ceilings) const {
  const double peak = std::max(ceilings.bf16, ceilings.fp32);
  const double arithmetic = peak > 0 ? operations / peak : 0;
  return std::max(weight_bytes / ceilings.read, arithmetic) / timing.median;
}

nlohmann::ordered_json ModelJson(const ModelPhase& phase, const MachineCeilings& ceilings) {
  nlohmann::ordered_json row = {{"op", "model"},
                                {"phase", phase.name},
                                {"test", phase.Test()},
                                {"prompt_tokens", phase.prompt_tokens},
                                {"new_tokens", phase.new_tokens},
                                {"batch", phase.batch},
                                {"tokens", phase.tokens}};
  row.update(TimingJson(phase.timing));
  row["tokens_per_second"] = phase.TokensPerSecond();
  row["gbps"] = phase.weight_bytes / phase.timing.median * 1e-9;
  row["tflops"] = phase.operations / phase.timing.median * 1e-12;
  row["roofline_fraction"] = phase.Fraction(ceilings);
  row["products_seconds"] = phase.products.median;
  row["products_fraction"] = phase.ProductsFraction();
  if (!phase.profile.empty()) row["profile"] = ProfileJson(phase);
  return row;
}

std::string ModelText(const std::vector<ModelPhase>& phases, const MachineCeilings& ceilings) {
  Table table({"test", "batch", "tokens/s", "10 to 90 %", "ms", "GB/s", "TFLOP/s", "roofline",
               "products alone"});
  for (const ModelPhase& phase : phases) {
    const auto tokens = static_cast<double>(phase.tokens);
    const double seconds = phase.timing.median;
    table.AddRow(
        {phase.Test(), std::to_string(phase.batch), fmt::format("{:.1f}", phase.TokensPerSecond()),
         fmt::format("{:.1f} to {:.1f}", tokens / phase.timing.p90, tokens / phase.timing.p10),
         fmt::format("{:.3f}", 1e3 * seconds),
         fmt::format("{:.1f}", phase.weight_bytes / seconds * 1e-9),
         fmt::format("{:.3f}", phase.operations / seconds * 1e-12),
         fmt::format("{:.0f} %", 100 * phase.Fraction(ceilings)),
         fmt::format("{:.0f} %", 100 * phase.ProductsFraction())});
  }
  return table.ToString();
}

}  // namespace marlin::bench
