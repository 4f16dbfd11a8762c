#include "cli/model_arguments.h"

#include <fmt/format.h>

#include <charconv>
#include <fstream>
#include <iostream>
#include <sstream>

#include "base/macros.h"

namespace marlin::cli {
namespace {

constexpr int64_t kDefaultWindow = 256;

bool IsSeparator(char c) {
  return c == ' ' || c == '\n' || c == '\r' || c == '\t' || c == ',' || c == '[' || c == ']';
}

}  // namespace

void RunArguments::Declare(ArgumentList& arguments) {
  arguments.Option("--device", &device_, "DEVICE", "cpu or auto");
  arguments.Option("--threads", &threads_, "N", "Default: all processors");
  arguments.Flag("--exact", &exact_, "Keep activations, keys and values in fp32 throughout");
}

Result<Model> RunArguments::Open(const std::string& path) const {
  if (threads_ && (*threads_ < 1 || *threads_ > 4096)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("--threads: expected 1..4096, got {}", *threads_));
  }
  MARLIN_ASSIGN_OR_RETURN(const Device device,
                          Device::Open(device_, {static_cast<int>(threads_.value_or(0))}));
  return Model::Open(path, device, {.allow_bf16_activations = !exact_});
}

Result<std::string> ReadText(const std::string& path) {
  std::ostringstream text;
  if (path == "-") {
    text << std::cin.rdbuf();
    return std::move(text).str();
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return Status(Code::kIo, fmt::format("{}: cannot be opened", path));
  text << file.rdbuf();
  if (file.bad()) return Status(Code::kIo, fmt::format("{}: cannot be read", path));
  return std::move(text).str();
}

Result<std::vector<int32_t>> ReadTokens(const std::string& path) {
  MARLIN_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < text.size();) {
    if (IsSeparator(text[i])) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < text.size() && !IsSeparator(text[end])) ++end;
    int32_t token = 0;
    const auto parsed = std::from_chars(text.data() + i, text.data() + end, token);
    if (parsed.ec != std::errc() || parsed.ptr != text.data() + end) {
      return Status(Code::kMalformedFile,
                    fmt::format("{}: token {}: expected a number, got '{}'", path, tokens.size(),
                                text.substr(i, std::min<size_t>(end - i, 40))));
    }
    tokens.push_back(token);
    i = end;
  }
  return tokens;
}

Result<std::unique_ptr<TextCodec>> OpenCodec(const Console& console, const std::string& directory,
                                             const Model& model) {
  if (!console.text_codecs()) {
    return Status(Code::kUnsupported,
                  "text needs the command of the Python package (pip install .), which has a "
                  "tokenizer; this one takes --tokens");
  }
  MARLIN_ASSIGN_OR_RETURN(std::unique_ptr<TextCodec> codec, console.text_codecs()(directory));
  if (codec->vocab_size() > model.info().vocab_size) {
    return Status(Code::kMalformedFile,
                  fmt::format("{}: the tokenizer has {} tokens, the model {}", directory,
                              codec->vocab_size(), model.info().vocab_size));
  }
  return codec;
}

void CorpusArguments::Declare(ArgumentList& arguments) {
  arguments.Option("--text", &text_, "FILE", "The text; - is the standard input");
  arguments.Option("--tokens", &tokens_, "FILE", "Token ids instead, between spaces or commas");
  arguments.Option("--window", &window_, "N", "Tokens that the model sees at once; default 256");
  arguments.Option("--stride", &stride_, "N", "From one window to the next; default: the window");
  arguments.Option("--max-windows", &max_windows_, "N", "Default: all");
}

Status CorpusArguments::Check() const {
  if (text_.has_value() != tokens_.has_value()) return {};
  return Status(Code::kInvalidArgument,
                text_ ? "--text and --tokens exclude each other" : "--text or --tokens is needed");
}

Result<std::vector<int32_t>> CorpusArguments::Read(const Console& console,
                                                   const std::string& directory,
                                                   const Model& model) const {
  MARLIN_RETURN_IF_ERROR(Check());
  if (tokens_) return ReadTokens(*tokens_);
  MARLIN_ASSIGN_OR_RETURN(const auto codec, OpenCodec(console, directory, model));
  MARLIN_ASSIGN_OR_RETURN(const std::string text, ReadText(*text_));
  return codec->Encode(text);
}

EvaluateOptions CorpusArguments::Windows() const {
  EvaluateOptions options;
  options.window = window_.value_or(kDefaultWindow);
  options.stride = stride_.value_or(0);
  options.max_windows = max_windows_.value_or(0);
  return options;
}

}  // namespace marlin::cli
