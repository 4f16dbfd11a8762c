#include "cli/arguments/model_arguments.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <utility>

#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "base/text_table.h"
#include "bench/read_probe.h"
#include "marlin/routing.h"

namespace marlin::cli {
namespace {

constexpr int64_t kDefaultWindow = 256;
constexpr size_t kShownBytes = 40;

/// Splits numbers at white space and commas, optionally in brackets.
class TokenReader {
 public:
  TokenReader(const std::string& path, std::string_view text) : path_(path), text_(text) {}

  Result<std::vector<int32_t>> Read() {
    std::vector<int32_t> tokens;
    SkipSeparators();
    const bool array = at_ < text_.size() && text_[at_] == '[';
    if (array) ++at_;
    for (SkipSeparators(); at_ < text_.size() && !(array && text_[at_] == ']'); SkipSeparators()) {
      const std::string_view word = Word();
      int32_t token = 0;
      const auto parsed = std::from_chars(word.data(), word.data() + word.size(), token);
      if (parsed.ec != std::errc() || parsed.ptr != word.data() + word.size()) {
        return Malformed("expected a token id", word);
      }
      tokens.push_back(token);
      at_ += word.size();
    }
    if (!array) return tokens;
    if (at_ == text_.size()) return Malformed("expected ']'", "the end");
    ++at_;
    SkipSeparators();
    if (at_ < text_.size()) return Malformed("expected nothing after ']'", Word());
    return tokens;
  }

 private:
  static bool IsSeparator(char c) {
    return c == ' ' || c == '\n' || c == '\r' || c == '\t' || c == ',';
  }
  void SkipSeparators() {
    while (at_ < text_.size() && IsSeparator(text_[at_])) ++at_;
  }
  /// The text up to the next separator; a bracket is a word of its own.
  std::string_view Word() const {
    size_t end = at_ + 1;
    const auto ends = [](char c) { return IsSeparator(c) || c == '[' || c == ']'; };
    while (end < text_.size() && !ends(text_[at_]) && !ends(text_[end])) ++end;
    return text_.substr(at_, end - at_);
  }
  Status Malformed(std::string_view what, std::string_view found) const {
    const std::string_view before = text_.substr(0, at_);
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const size_t line_begin = before.rfind('\n') + 1;  // npos + 1 is 0.
    return Status(Code::kMalformedFile,
                  fmt::format("{}: line {}, column {}: {}, got '{}'", Printable(path_), line,
                              at_ - line_begin + 1, what, Printable(found, kShownBytes)));
  }

  const std::string& path_;
  std::string_view text_;
  size_t at_ = 0;
};

/// Limits of any model; Model::Open checks against the model.
constexpr int64_t kMostHostExperts = 4096;
constexpr int64_t kMostGpuLayers = 4096;

}  // namespace

void KvCacheArgument::Declare(ArgumentList& arguments, const char* help) {
  arguments.Option("--kv-cache", &name_, "TYPE", help);
  arguments.Choices({"f32", "bf16", "fp8_e4m3"});
}

Result<std::optional<DType>> KvCacheArgument::Type() const {
  if (!name_) return std::optional<DType>();
  const Result<DType> type = ParseKvCacheType(*name_);
  if (!type.ok()) return type.status().WithContext("--kv-cache");
  return std::optional<DType>(*type);
}

void GpuLayersArgument::Declare(ArgumentList& arguments) {
  arguments.Option("--gpu-layers", &count_, "N|auto",
                   "The last N layers on the GPU, the others on the CPU; auto: those that fit");
  arguments.Choices({"auto"});
}

Result<int64_t> GpuLayersArgument::Count() const {
  if (count_ == "auto") return kGpuLayersAuto;
  return ParseOption("--gpu-layers", count_, WholeRange{0, kMostGpuLayers});
}

Result<std::string> DescribeLayers(const Model& model) {
  const ModelInfo& info = model.info();
  if (info.host_layers == 0) return std::string();
  MARLIN_ASSIGN_OR_RETURN(const double bandwidth, bench::MeasureReadBandwidth());
  const auto bytes = static_cast<double>(info.host_bytes_per_token);
  return fmt::format(
      "{} of {} layers on the host ({}), the last {} and the head on {} ({}); at most {:.1f} "
      "tokens/s, since the host reads {} for each at {:.0f} GB/s",
      info.host_layers, info.layers, FormatBytes(info.host_bytes), info.layers - info.host_layers,
      model.device().info().name, FormatBytes(info.bytes), bandwidth / std::max(bytes, 1.0),
      FormatBytes(info.host_bytes_per_token), bandwidth * 1e-9);
}

void RunArguments::Declare(ArgumentList& arguments) {
  device_.Declare(arguments, "auto, cpu, cuda, cuda:N, metal or metal-sim");
  arguments.Option("--threads", &threads_, kThreadRange, "N",
                   "Threads of the CPU; default: all processors");
  arguments.Flag("--exact", &exact_, "Keep activations, keys and values in fp32");
  arguments.Flag("--batch-invariant", &batch_invariant_,
                 "Logits independent of batch and passes, bit for bit; slower");
  arguments.Flag("--allow-extra-tensors", &allow_extra_tensors_,
                 "Leave out tensors that the index does not list or the model does not have");
  kv_cache_.Declare(arguments,
                    "MODEL's keys and values: f32, bf16 or fp8_e4m3; default bf16, --exact: f32");
  arguments.Option("--prepared", &prepared_, "FILE",
                   "MODEL's weights from `prepare`, mapped instead of prepared again");
  arguments.Option("--gpu-memory", &gpu_memory_, "SIZE",
                   "Memory of a GPU for weights and KV cache, such as 24GB; default: what is free");
  gpu_layers_.Declare(arguments);
  arguments.Option("--host-experts", &host_experts_, "N|auto",
                   "Experts of every layer that the CPU computes; auto: those that do not fit");
  arguments.Choices({"auto"});
  arguments.Option("--frequencies", &frequencies_, "FILE",
                   "With --host-experts: `analyze --routing`'s, to keep frequent ones on the GPU");
}

Result<ModelOptions> RunArguments::Options() const {
  ModelOptions options;
  options.allow_bf16_activations = !exact_;
  options.batch_invariant = batch_invariant_;
  options.allow_extra_tensors = allow_extra_tensors_;
  if (!gpu_memory_.empty()) {
    MARLIN_ASSIGN_OR_RETURN(options.device_memory, ParseByteSize("--gpu-memory", gpu_memory_));
  }
  MARLIN_ASSIGN_OR_RETURN(options.gpu_layers, gpu_layers_.Count());
  if (host_experts_ == "auto") {
    options.host_experts = kHostExpertsAuto;
  } else if (!host_experts_.empty()) {
    MARLIN_ASSIGN_OR_RETURN(options.host_experts, ParseOption("--host-experts", host_experts_,
                                                              WholeRange{0, kMostHostExperts}));
  }
  if (!frequencies_.empty() && host_experts_.empty()) {
    return Invalid("--frequencies: only with --host-experts");
  }
  return options;
}

Result<Device> RunArguments::OpenDevice() const {
  return device_.Open({static_cast<int>(threads_.value_or(0))});
}

Result<Model> RunArguments::Open(Console& console, const std::string& path,
                                 const Device& device) const {
  MARLIN_ASSIGN_OR_RETURN(ModelOptions options, Options());
  options.prepared = prepared_;
  options.draft = draft_;
  MARLIN_ASSIGN_OR_RETURN(options.kv_cache, kv_cache_.Type());
  MARLIN_ASSIGN_OR_RETURN(Model model, OpenWith(std::move(options), path, device));
  device_.SayTaken(console, model.device().info());
  const ModelInfo& info = model.info();
  for (const std::string& note : info.notes) console.Message(fmt::format("{}: {}", path, note));
  if (console.verbose() && !info.fusion.empty()) {
    console.Message(fmt::format("fused in decode: {}", info.fusion));
  }
  MARLIN_ASSIGN_OR_RETURN(const std::string layers, DescribeLayers(model));
  if (!layers.empty()) console.Message(layers);
  if (info.host_experts > 0) {
    console.Message(fmt::format("experts on the host: {} ({})", FormatInteger(info.host_experts),
                                FormatBytes(info.host_bytes)));
  }
  return model;
}

Result<Model> RunArguments::OpenReference(const std::string& path, const Device& device) const {
  MARLIN_ASSIGN_OR_RETURN(ModelOptions options, Options());
  return OpenWith(std::move(options), path, device);
}

Result<Model> RunArguments::OpenDraft(const std::string& path, const Device& device) const {
  MARLIN_ASSIGN_OR_RETURN(ModelOptions options, Options());
  // These are about the other model.
  const ModelOptions defaults;
  options.gpu_layers = defaults.gpu_layers;
  options.host_experts = defaults.host_experts;
  options.device_memory = defaults.device_memory;
  return Model::Open(path, device, options);
}

Result<Model> RunArguments::OpenWith(ModelOptions options, const std::string& path,
                                     const Device& device) const {
  if (frequencies_.empty()) return Model::Open(path, device, options);
  MARLIN_ASSIGN_OR_RETURN(const RoutingFrequencies routing,
                          RoutingFrequencies::FromFile(frequencies_));
  options.routing = &routing;
  return Model::Open(path, device, options);
}

Result<Model> RunArguments::Open(Console& console, const std::string& path) const {
  MARLIN_ASSIGN_OR_RETURN(const Device device, OpenDevice());
  return Open(console, path, device);
}

void SayHostOperations(Console& console, const Model& model) {
  const DeviceInfo device = model.device().info();
  std::string without;
  std::string not_taken;
  for (const HostOperation& operation : device.host_operations) {
    std::string& list = operation.has_kernel ? not_taken : without;
    list += fmt::format("{}{} {}", list.empty() ? "" : ", ", operation.name,
                        FormatCounted(operation.calls, "time"));
  }
  if (without.empty() && not_taken.empty()) return;
  if (!without.empty()) without += fmt::format(" ({} has no kernel)", device.name);
  if (!not_taken.empty()) not_taken += fmt::format(" ({}'s kernel takes other calls)", device.name);
  const char* const between = without.empty() || not_taken.empty() ? "" : "; ";
  console.Message(fmt::format("on the CPU: {}{}{}", without, between, not_taken));
}

Status CannotWrite(const std::string& path) {
  return Status(Code::kIo, fmt::format("{}: cannot be written", Printable(path)));
}

Status WriteText(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::trunc | std::ios::binary);
  file << text;
  file.close();
  return file ? Status() : CannotWrite(path);
}

Result<std::string> ReadText(const std::string& path) {
  return path == "-" ? ReadStandardInput(kMaxTextBytes) : ReadFile(path, kMaxTextBytes);
}

Result<std::vector<int32_t>> ReadTokens(const std::string& path) {
  MARLIN_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  return TokenReader(path, text).Read();
}

Status CheckHasCodec(const Console& console, std::string_view option, std::string_view ids) {
  if (console.text_codecs()) return {};
  return Status(Code::kUnsupported,
                fmt::format("{}: needs a tokenizer, which the Python package's command has: {}{}",
                            option, kPythonCommand,
                            ids.empty() ? "" : fmt::format("; {} takes token ids instead", ids)));
}

void SpecialTokensArgument::Declare(ArgumentList& arguments) {
  arguments.Flag("--no-special-tokens", &without_,
                 "Do not add the special tokens (BOS) that the tokenizer adds to a text");
}

Result<std::unique_ptr<TextCodec>> OpenCodec(const Console& console, std::string_view option,
                                             const std::string& directory) {
  MARLIN_RETURN_IF_ERROR(CheckHasCodec(console, option, ""));
  return console.text_codecs()(directory);
}

Status CheckVocabulary(std::span<const int32_t> tokens, const std::string& directory,
                       const Model& model) {
  for (const int32_t token : tokens) {
    if (token >= 0 && token < model.info().vocab_size) continue;
    return Status(Code::kMalformedFile,
                  fmt::format("{}: the tokenizer gives the token id {}, the model has 0..{}",
                              directory, token, model.info().vocab_size - 1));
  }
  return {};
}

Result<std::vector<int32_t>> EncodeText(TextCodec& codec, std::string_view text,
                                        const SpecialTokensArgument& special,
                                        const std::string& directory, const Model& model) {
  MARLIN_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, codec.Encode(text, special.added()));
  MARLIN_RETURN_IF_ERROR(CheckVocabulary(tokens, directory, model));
  return tokens;
}

void CorpusArguments::Declare(ArgumentList& arguments) {
  arguments.Option("--text", &text_, "FILE", "The text; - is the standard input");
  arguments.Option("--tokens", &tokens_, "FILE",
                   "Token ids instead, separated by spaces or commas");
  special_.Declare(arguments);
  arguments.Option("--window", &window_, {.least = 1}, "N",
                   "Tokens per evaluation window; default 256");
  arguments.Option("--stride", &stride_, WholeRange(), "N",
                   "Tokens between window starts; default: the window");
  arguments.Option("--max-windows", &max_windows_, WholeRange(), "N",
                   "Windows to evaluate at most; default: all");
}

Status CorpusArguments::Check(const Console& console) const {
  if (text_.has_value() == tokens_.has_value()) {
    return Invalid(text_ ? "--text and --tokens exclude each other"
                         : "--text or --tokens is needed");
  }
  return text_ ? CheckHasCodec(console, "--text", "--tokens") : Status();
}

Result<std::vector<int32_t>> CorpusArguments::Read(const Console& console,
                                                   const std::string& directory,
                                                   const Model& model) const {
  if (tokens_) return ReadTokens(*tokens_);
  MARLIN_ASSIGN_OR_RETURN(const auto codec, OpenCodec(console, "--text", directory));
  MARLIN_ASSIGN_OR_RETURN(const std::string text, ReadText(*text_));
  Result<std::vector<int32_t>> tokens = EncodeText(*codec, text, special_, directory, model);
  return tokens.ok() ? std::move(tokens) : tokens.status().WithContext(*text_);
}

EvaluateOptions CorpusArguments::Windows() const {
  EvaluateOptions options;
  options.window = window_.value_or(kDefaultWindow);
  options.stride = stride_.value_or(0);
  options.max_windows = max_windows_.value_or(0);
  return options;
}

}  // namespace marlin::cli
