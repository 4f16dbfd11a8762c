#include "checkpoint/readers/gguf/gguf_rope.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>

#include "recipe/rope_parameters.h"

namespace marlin {
namespace {

double ShortestReal(double value) {
  return std::stod(fmt::format("{}", static_cast<float>(value)));
}

Json WholeOrReal(double value) {
  if (value == std::floor(value) && value < 1e15) return static_cast<uint64_t>(value);
  return value;
}

/// A type that is refused with these words.
Json NotUnderstood(const std::string& what) { return {{"rope_type", what}}; }

/// The numbers of Llama 3.1's scaling, of which a file has only the quotients of frequencies.
struct Llama3Numbers {
  double factor = 8;
  double low = 1;
  double high = 4;
  double context = 8192;

  double Quotient(double frequency) const {
    const double turns = context * frequency / (2 * std::numbers::pi);
    const double smooth = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    return 1 / ((1 - smooth) / factor + smooth);
  }
};

/// Frequencies of the pairs of a head.
std::vector<double> Frequencies(double theta, size_t pairs) {
  std::vector<double> frequencies(pairs);
  for (size_t i = 0; i < pairs; ++i) {
    frequencies[i] = std::pow(theta, -static_cast<double>(i) / static_cast<double>(pairs));
  }
  return frequencies;
}

bool GivesAll(const Llama3Numbers& numbers, std::span<const float> quotients,
              const std::vector<double>& frequencies) {
  for (size_t i = 0; i < quotients.size(); ++i) {
    const double expected = numbers.Quotient(frequencies[i]);
    if (!(std::abs(quotients[i] - expected) <= 1e-3 * expected)) return false;
  }
  return true;
}

/// The numbers from two quotients between the ends. Between them the interpolation is linear in the
/// frequency, with two coefficients for three numbers, so that low can be 1.
std::optional<Llama3Numbers> Solve(double factor, std::span<const float> quotients,
                                   const std::vector<double>& frequencies) {
  std::optional<std::pair<double, double>> first;
  std::optional<std::pair<double, double>> last;
  for (size_t i = 0; i < quotients.size(); ++i) {
    const double smooth = (1 / static_cast<double>(quotients[i]) - 1 / factor) / (1 - 1 / factor);
    if (smooth < 1e-3 || smooth > 1 - 1e-3) continue;
    if (!first) first = {frequencies[i], smooth};
    last = {frequencies[i], smooth};
  }
  if (!first || first->first == last->first) return std::nullopt;
  const double slope = (first->second - last->second) / (first->first - last->first);
  const double offset = slope * first->first - first->second;
  if (!(offset > 0)) return std::nullopt;
  Llama3Numbers numbers{factor, 1, 1 + 1 / offset, 0};
  const double context = slope * (numbers.high - numbers.low) * 2 * std::numbers::pi;
  const double whole = std::round(context);
  numbers.context = std::abs(context - whole) <= 1e-4 * context ? whole : context;
  const double high = std::round(numbers.high);
  if (std::abs(numbers.high - high) <= 1e-3 * high) numbers.high = high;
  return numbers;
}

}  // namespace

std::string GgufRope::Key(std::string_view key) const {
  return fmt::format("{}.{}", architecture_.name, key);
}

double GgufRope::Real(std::string_view key, double fallback) const {
  return metadata_.Real(Key(key)).value_or(fallback);
}

Json GgufRope::Scaling() const {
  if (!short_factors_.empty() || !long_factors_.empty()) return LongRope();
  // The runtime of these files takes a factor without a type for linear scaling, and none for 0.
  const std::string type(metadata_.Text(Key("rope.scaling.type")).value_or("linear"));
  double factor = Real("rope.scaling.factor", Real("rope.scale_linear", 0));
  if (factor == 0 || type == "none") factor = 1;
  const double attention = Real("rope.scaling.attn_factor", 1);
  if (type == "longrope") return NotUnderstood(type);
  if (type != "none" && type != "linear" && type != "yarn") {
    return NotUnderstood(fmt::format("{}: {}", Key("rope.scaling.type"), type));
  }
  if (type == "yarn" && (factor != 1 || attention != 1)) return Yarn(factor);
  if (attention != 1) {
    return NotUnderstood(
        fmt::format("{} with {} of {}", type, Key("rope.scaling.attn_factor"), attention));
  }
  const bool linear = factor != 1;
  Json from_factors = FromFactors();
  if (!linear) return from_factors;
  if (!from_factors.empty()) return NotUnderstood("rope_freqs.weight beside linear scaling");
  return {{"rope_type", "linear"}, {"factor", ShortestReal(factor)}};
}

/// The runtime of these files takes attn_factor as it is.
Json GgufRope::LongRope() const {
  const auto list = [](std::span<const float> factors) {
    Json values = Json::array();
    for (const float factor : factors) values.push_back(ShortestReal(factor));
    return values;
  };
  const std::string type(metadata_.Text(Key("rope.scaling.type")).value_or("longrope"));
  if (type != "longrope") return NotUnderstood(type + " with rope_factors_short.weight");
  if (!FromFactors().empty())
    return NotUnderstood("rope_freqs.weight and rope_factors_short.weight");
  return {{"rope_type", "longrope"},
          {"short_factor", list(short_factors_)},
          {"long_factor", list(long_factors_)},
          {"attention_factor", ShortestReal(Real("rope.scaling.attn_factor", 1))}};
}

Json GgufRope::Yarn(double factor) const {
  if (!FromFactors().empty()) return NotUnderstood("rope_freqs.weight beside yarn scaling");
  const double extrapolation = Real("rope.scaling.yarn_ext_factor", 1);
  if (extrapolation != 1) {
    return NotUnderstood(
        fmt::format("yarn with {} of {}", Key("rope.scaling.yarn_ext_factor"), extrapolation));
  }
  Json scaling = {{"rope_type", "yarn"}, {"factor", ShortestReal(factor)}};
  const auto copy = [&](std::string_view key, const char* name) {
    if (const auto number = metadata_.Real(Key(key))) scaling[name] = ShortestReal(*number);
  };
  copy("rope.scaling.yarn_beta_fast", "beta_fast");
  copy("rope.scaling.yarn_beta_slow", "beta_slow");
  const auto context = metadata_.Integer(Key("rope.scaling.original_context_length"));
  if (context && *context > 0) {
    scaling["original_max_position_embeddings"] = static_cast<uint64_t>(*context);
  }
  if (architecture_.name == "gpt-oss") scaling["truncate"] = false;
  double inferred = YarnScale(factor, 1);
  if (const double log = Real("rope.scaling.yarn_log_multiplier", 0); log != 0) {
    if (architecture_.name != "deepseek2") {
      return NotUnderstood("yarn with " + Key("rope.scaling.yarn_log_multiplier"));
    }
    // DeepSeek's converter stores a tenth of mscale_all_dim.
    scaling["mscale"] = scaling["mscale_all_dim"] = ShortestReal(log * 10);
    inferred = 1;
  }
  // Multiplies the factor that follows from the others, unlike attention_factor.
  const double attention = Real("rope.scaling.attn_factor", 1) * inferred;
  if (attention != inferred) scaling["attention_factor"] = ShortestReal(attention);
  // Converters store attention_factor here; the runtime of these files computes it anew.
  const double stored = Real("rope.scaling.yarn_attn_factor", 1);
  if (stored != 1 && std::abs(stored - attention) > 1e-5 * attention) {
    return NotUnderstood(
        fmt::format("yarn with {} of {}", Key("rope.scaling.yarn_attn_factor"), stored));
  }
  return scaling;
}

Json GgufRope::FromFactors() const {
  if (factors_.empty()) return Json::object();
  const double factor = *std::max_element(factors_.begin(), factors_.end());
  const double least = *std::min_element(factors_.begin(), factors_.end());
  if (factor == 1 && least == 1) return Json::object();
  const std::vector<double> frequencies =
      Frequencies(metadata_.Real(Key("rope.freq_base")).value_or(10000), factors_.size());
  Llama3Numbers numbers;
  numbers.factor = factor;
  if (!GivesAll(numbers, factors_, frequencies)) {
    const std::optional<Llama3Numbers> solved = Solve(factor, factors_, frequencies);
    if (!solved || !GivesAll(*solved, factors_, frequencies)) {
      return NotUnderstood("rope_freqs.weight, whose factors are not those of llama3");
    }
    numbers = *solved;
  }
  return {{"rope_type", "llama3"},
          {"factor", ShortestReal(factor)},
          {"low_freq_factor", numbers.low},
          {"high_freq_factor", numbers.high},
          {"original_max_position_embeddings", WholeOrReal(numbers.context)}};
}

}  // namespace marlin
