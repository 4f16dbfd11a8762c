#include "text/documents.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <string>

namespace marlin {
namespace {

using Json = nlohmann::ordered_json;

}  // namespace

Json PerplexityDocument(const PerplexityResult& result) {
  return {{"perplexity", result.perplexity},
          {"nll", result.nll},
          {"tokens", result.tokens},
          {"standard_error", result.standard_error},
          {"windows", result.windows}};
}

Json ComparisonDocument(const CompareResult& result) {
  // Both models predict the same tokens of the same windows.
  const auto document_of = [](const PerplexityResult& one) -> Json {
    return {
        {"perplexity", one.perplexity}, {"nll", one.nll}, {"standard_error", one.standard_error}};
  };
  return {{"model", document_of(result.model)},
          {"reference", document_of(result.reference)},
          {"tokens", result.model.tokens},
          {"windows", result.model.windows},
          {"perplexity_ratio", result.perplexity_ratio},
          {"perplexity_ratio_error", result.perplexity_ratio_error},
          {"kl_mean", result.kl_mean},
          {"kl_median", result.kl_median},
          {"kl_p99", result.kl_p99},
          {"kl_max", result.kl_max},
          {"top1_agreement", result.top1_agreement}};
}

Json AcceptanceDocument(const AcceptanceResult& result) {
  Json depths = Json::array();
  for (const DepthAcceptance& depth : result.depths) {
    depths.push_back({{"depth", std::ssize(depths) + 1},
                      {"accepted", depth.accepted},
                      {"positions", depth.positions}});
  }
  return depths;
}

Json PreparedDocument(const PrepareModelReport& report) {
  return {{"output", report.output},
          {"layout", report.layout},
          {"bytes", report.bytes},
          {"seconds", report.seconds}};
}

Json SamplingDocument(const SamplingOptions& sampling) {
  const auto shortest = [](float value) { return std::stod(fmt::format("{}", value)); };
  return {{"temperature", shortest(sampling.temperature)},
          {"top_k", sampling.top_k},
          {"top_p", shortest(sampling.top_p)},
          {"min_p", shortest(sampling.min_p)},
          {"repetition_penalty", shortest(sampling.repetition_penalty)}};
}

double DecodeRate(const Generated& generated) {
  const auto decoded = static_cast<double>(generated.token_ids.size()) - 1;
  return generated.decode_seconds > 0 ? decoded / generated.decode_seconds : 0.0;
}

Json DraftsDocument(const DraftCounts& drafts) {
  return {{"passes", drafts.passes},
          {"drafted", drafts.drafted},
          {"accepted", drafts.accepted},
          {"mean_accepted", drafts.MeanAccepted()}};
}

Json GeneratedDocument(const Json& text, std::string_view reason, const Generated& generated,
                       size_t prompt_tokens, const SamplingOptions& sampling) {
  return {{"text", text},
          {"token_ids", generated.token_ids},
          {"stop_reason", reason},
          {"tokens_per_second", DecodeRate(generated)},
          {"prompt_tokens", prompt_tokens},
          {"prefill_seconds", generated.prefill_seconds},
          {"decode_seconds", generated.decode_seconds},
          {"drafts", DraftsDocument(generated.drafts)},
          {"sampling", SamplingDocument(sampling)}};
}

Json SkippedJson(const std::vector<SkippedTensor>& skipped) {
  Json array = Json::array();
  for (const SkippedTensor& tensor : skipped) {
    array.push_back({{"name", tensor.name}, {"reason", tensor.reason}});
  }
  return array;
}

Json EndsDocument(const ModelEnds& ends) {
  const auto matrix = [](const ModelEnds::Matrix& end) {
    if (end.format.empty()) return Json();
    return Json{{"format", end.format}, {"bits_per_weight", end.bits_per_weight}};
  };
  return {{"embedding", matrix(ends.embedding)}, {"head", matrix(ends.head)}, {"tied", ends.tied}};
}

Json QuantizedDocument(const QuantizeCheckpointReport& report,
                       const QuantizeCheckpointOptions& options) {
  return {{"output", report.output},
          {"recipe", options.recipe.name()},
          {"method", QuantizeMethodName(options.method)},
          {"dry_run", options.dry_run},
          {"tensors", report.tensors},
          {"parameters", report.parameters},
          {"quantized_parameters", report.quantized_parameters},
          {"bits_per_weight", report.bits_per_weight},
          {"quantized_bits_per_weight", report.quantized_bits_per_weight},
          {"bytes", report.bytes},
          {"coverage", report.coverage},
          {"ends", EndsDocument(report.ends)},
          {"calibrated_parameters", report.calibrated_parameters},
          {"skipped", SkippedJson(report.skipped)},
          {"fallbacks", SkippedJson(report.fallbacks)},
          {"unselected_experts", report.unselected_experts},
          {"notes", report.notes},
          {"zeroed_groups", report.zeroed_groups},
          {"inputs", report.inputs},
          {"scaled_inputs", report.scaled_inputs},
          {"rotatable", report.rotatable},
          {"rotated", report.rotated},
          {"runs", report.unsupported_type.empty()},
          {"seconds", report.seconds}};
}

}  // namespace marlin
