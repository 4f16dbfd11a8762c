#include "cli/arguments/product_arguments.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"
#include "base/memory_size.h"
#include "layout/weights_buffer.h"

namespace marlin::cli {
namespace {

constexpr int64_t kDefaultGroup = 128;

DType ActivationType(const std::string& name) {
  if (name == "bf16") return DType::kBf16;
  return name == "f16" ? DType::kF16 : DType::kF32;
}

}  // namespace

std::vector<std::string> SplitList(const std::string& list) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t comma = list.find(','); comma != std::string::npos; comma = list.find(',', begin)) {
    parts.push_back(list.substr(begin, comma - begin));
    begin = comma + 1;
  }
  parts.push_back(list.substr(begin));
  return parts;
}

Result<bench::GemmShape> ParseShape(const std::string& text) {
  bench::GemmShape shape;
  int64_t* const fields[] = {&shape.m, &shape.n, &shape.k};
  const char* position = text.data();
  const char* const end = position + text.size();
  for (int i = 0; i < 3; ++i) {
    const auto [next, error] = std::from_chars(position, end, *fields[i]);
    const bool last = i == 2;
    if (error != std::errc() || *fields[i] < 1 || (last ? next != end : next == end) ||
        (!last && *next != ',')) {
      return Invalid(fmt::format("--shape: expected M,N,K of at least 1, got '{}'", text));
    }
    position = last ? next : next + 1;
  }
  return shape;
}

Status CheckCaseFits(const bench::BenchCase& bench) {
  const auto [m, n, k] = bench.shape;
  const std::string name = fmt::format("--shape {},{},{}", m, n, k);
  if (const Status spec = CheckSpec(bench.spec); !spec.ok()) return spec.WithContext(name);
  // Operands have at most 4 bytes per element, and baselines take activations in two types.
  const Checked element(4);
  const Checked activations = Checked(2) * element * Checked(m) * Checked(k);
  const Checked output = element * Checked(m) * Checked(n);
  const Checked dense = element * Checked(n) * Checked(k);
  const Checked weights = Checked(2) * Checked(StoredBytes(bench.spec));
  const std::optional<int64_t> bytes = (activations + output + weights).Take();
  if (!bytes || !dense.valid()) {
    return Invalid(fmt::format("{}: the operands take more bytes than the {} that can be counted",
                               name, INT64_MAX));
  }
  const int64_t memory = MemoryBytes();
  const int64_t wanted = bench.op == "dequantize" ? std::max(*bytes, *dense.Take()) : *bytes;
  if (wanted <= memory) return {};
  return Status(
      Code::kOutOfMemory,
      fmt::format("{}: the operands take {} bytes, this machine has {}", name, wanted, memory));
}

void ProductArguments::Declare(ArgumentList& arguments) {
  arguments.Option("--format", &formats_, "FORMAT,...",
                   "Format of the weights; default fp4_e2m1; may be repeated");
  arguments.Choices(AllFormats(), [](const FormatInfo& format) { return format.name; });
  arguments.Option("--group-size", &group_size_, {.least = 16}, "G",
                   "Weights per scale; default 128");
  arguments.Option("--scale-dtype", &scale_type_, "TYPE",
                   "Type of the scales: fp16, bf16, fp32, e8m0 or e4m3");
  arguments.Choices(AllScaleTypes(), ScaleTypeName);
  arguments.Option("--activations", &activation_type_, "TYPE",
                   "Type of the activations: bf16, f16 or f32");
  arguments.Choices({"bf16", "f16", "f32"});
  arguments.Option(
      "--copies", &copies_, {1, 65536}, "N",
      "Weight matrices to rotate through, so that none is in a cache; default: 1 GiB of "
      "them, 330 MB on a GPU");
}

Status ProductArguments::Read() {
  const std::vector<std::string> lists =
      formats_.empty() ? std::vector<std::string>{"fp4_e2m1"} : formats_;
  for (const std::string& list : lists) {
    for (const std::string& name : SplitList(list)) {
      const Result<Format> format = ParseFormat(name);
      if (!format.ok()) return format.status().WithContext("--format");
      parsed_formats_.push_back(*format);
    }
  }
  MARLIN_ASSIGN_OR_RETURN(spec_.scale_type, ParseScaleType(scale_type_));
  spec_.has_global_scale = spec_.scale_type == ScaleType::kE4M3;
  if (activation_type_ != "bf16" && activation_type_ != "f16" && activation_type_ != "f32") {
    return Invalid(
        fmt::format("--activations: expected bf16, f16 or f32, got '{}'", activation_type_));
  }
  const int64_t group = group_size_.value_or(kDefaultGroup);
  if (group % 16 != 0) {
    return Invalid(fmt::format("--group-size: expected a multiple of 16, got {}", group));
  }
  return Status();
}

bench::BenchCase ProductArguments::MakeCase(Format format, const bench::GemmShape& shape,
                                            int64_t weight_bytes) const {
  bench::BenchCase bench;
  bench.shape = shape;
  bench.spec = spec_;
  bench.spec.format = format;
  bench.spec.n = shape.n;
  bench.spec.k = shape.k;
  bench.spec.group_size = std::min(group_size_.value_or(kDefaultGroup), shape.k);
  bench.spec.has_zeros = GetFormatInfo(format).zero_point == ZeroPoint::kRequired;
  bench.spec.experts = copies_.value_or(bench::CopiesBeyond(weight_bytes, bench.spec));
  bench.activation_type = ActivationType(activation_type_);
  return bench;
}

}  // namespace marlin::cli
