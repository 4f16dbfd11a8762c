#include "case.h"

#include <fmt/format.h>

#include <charconv>
#include <vector>

#include "base/macros.h"

namespace marlin::conformance {
namespace {

template <typename T>
struct Named {
  std::string_view name;
  T value;
};

constexpr Named<Check> kChecks[] = {
    {"gemm", Check::kGemm},
    {"dequantize", Check::kDequantize},
    {"batch_invariant", Check::kBatchInvariant},
    {"threads", Check::kThreads},
    {"row_permutation", Check::kRowPermutation},
    {"repeat", Check::kRepeat},
    {"streams", Check::kStreams},
    {"periodic", Check::kPeriodic},
    {"chain", Check::kChain},
};
constexpr Named<DataClass> kDataClasses[] = {
    {"lattice", DataClass::kLattice},
    {"lattice_wide", DataClass::kLatticeWide},
    {"lattice_int8", DataClass::kLatticeInt8},
    {"gaussian", DataClass::kGaussian},
    {"heavy", DataClass::kHeavy},
    {"one_hot", DataClass::kOneHot},
    {"extremes", DataClass::kExtremes},
    {"subnormal", DataClass::kSubnormal},
    {"non_finite", DataClass::kNonFinite},
    {"lattice_small", DataClass::kLatticeSmall},
};
constexpr Named<Activation> kActivations[] = {
    {"none", Activation::kNone},
    {"silu", Activation::kSilu},
    {"gelu_tanh", Activation::kGeluTanh},
    {"relu", Activation::kRelu},
};
constexpr Named<DType> kTypes[] = {
    {"f32", DType::kF32}, {"bf16", DType::kBf16}, {"f16", DType::kF16}};

template <typename T, size_t kCount>
std::string_view NameOf(const Named<T> (&table)[kCount], T value) {
  for (const Named<T>& entry : table) {
    if (entry.value == value) return entry.name;
  }
  return "?";
}

template <typename T, size_t kCount>
Status Find(const Named<T> (&table)[kCount], std::string_view part, T* value) {
  for (const Named<T>& entry : table) {
    if (entry.name == part) {
      *value = entry.value;
      return Status();
    }
  }
  return Status(Code::kInvalidArgument, fmt::format("case: '{}' is not understood", part));
}

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  size_t begin = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    if (i == text.size() || text[i] == separator) {
      parts.push_back(text.substr(begin, i - begin));
      begin = i + 1;
    }
  }
  return parts;
}

Status ParseNumber(std::string_view part, std::string_view prefix, int64_t* value) {
  const bool fits = part.substr(0, prefix.size()) == prefix;
  const char* begin = part.data() + (fits ? prefix.size() : 0);
  const char* end = part.data() + part.size();
  const auto [stop, error] = std::from_chars(begin, end, *value);
  if (fits && error == std::errc() && stop == end && *value >= 0) return Status();
  return Status(Code::kInvalidArgument,
                fmt::format("case: expected {}<number>, got '{}'", prefix, part));
}

std::string ShapePart(const Case& c) {
  std::string text = fmt::format("m{}_n{}_k{}_g{}", c.m, c.n, c.k, c.group_size);
  if (c.experts > 1) text += fmt::format("_e{}", c.experts);
  if (c.padded) text += "_padded";
  if (c.misaligned) text += "_misaligned";
  return text;
}

Status ParseShape(std::string_view part, Case* c) {
  const std::vector<std::string_view> words = Split(part, '_');
  if (words.size() < 4) {
    return Status(Code::kInvalidArgument, fmt::format("case: bad shape '{}'", part));
  }
  MARLIN_RETURN_IF_ERROR(ParseNumber(words[0], "m", &c->m));
  MARLIN_RETURN_IF_ERROR(ParseNumber(words[1], "n", &c->n));
  MARLIN_RETURN_IF_ERROR(ParseNumber(words[2], "k", &c->k));
  MARLIN_RETURN_IF_ERROR(ParseNumber(words[3], "g", &c->group_size));
  for (size_t i = 4; i < words.size(); ++i) {
    if (words[i] == "padded") {
      c->padded = true;
    } else if (words[i] == "misaligned") {
      c->misaligned = true;
    } else {
      int64_t experts = 0;
      MARLIN_RETURN_IF_ERROR(ParseNumber(words[i], "e", &experts));
      c->experts = static_cast<int>(experts);
    }
  }
  return Status();
}

std::string WeightPart(const Case& c) {
  std::string text(ScaleTypeName(c.scale_type));
  if (c.zero == ZeroKind::kInteger) text += "_zint";
  if (c.zero == ZeroKind::kFractional) text += "_zfrac";
  if (c.zero_type != ScaleType::kF16) text += fmt::format("_z{}", ScaleTypeName(c.zero_type));
  if (c.global_divides) text += "_divides";
  if (c.weight_biases) text += "_wbias";
  if (c.user_codebook) text += "_codebook";
  if (c.sparse) text += "_sparse";
  return text;
}

Status ParseWeightPart(std::string_view part, Case* c) {
  const std::vector<std::string_view> words = Split(part, '_');
  MARLIN_ASSIGN_OR_RETURN(c->scale_type, ParseScaleType(words[0]));
  for (size_t i = 1; i < words.size(); ++i) {
    if (words[i] == "zint") {
      c->zero = ZeroKind::kInteger;
    } else if (words[i] == "zfrac") {
      c->zero = ZeroKind::kFractional;
    } else if (words[i] == "zbf16") {
      c->zero_type = ScaleType::kBf16;
    } else if (words[i] == "zfp32") {
      c->zero_type = ScaleType::kF32;
    } else if (words[i] == "divides") {
      c->global_divides = true;
    } else if (words[i] == "wbias") {
      c->weight_biases = true;
    } else if (words[i] == "codebook") {
      c->user_codebook = true;
    } else if (words[i] == "sparse") {
      c->sparse = true;
    } else {
      return Status(Code::kInvalidArgument, fmt::format("case: bad weights '{}'", part));
    }
  }
  return Status();
}

std::string EpiloguePart(const Case& c) {
  std::string text;
  if (c.bias) text += fmt::format("bias_{}+", NameOf(kTypes, c.bias_type));
  text += NameOf(kActivations, c.activation);
  if (c.gated) text += "+gated";
  if (c.row_weight) text += "+row_weight";
  if (c.allow_bf16_activations) text += "+allow_bf16";
  return text;
}

Status ParseEpilogue(std::string_view part, Case* c) {
  for (std::string_view word : Split(part, '+')) {
    if (word.substr(0, 5) == "bias_") {
      c->bias = true;
      MARLIN_RETURN_IF_ERROR(Find(kTypes, word.substr(5), &c->bias_type));
    } else if (word == "gated") {
      c->gated = true;
    } else if (word == "row_weight") {
      c->row_weight = true;
    } else if (word == "allow_bf16") {
      c->allow_bf16_activations = true;
    } else {
      MARLIN_RETURN_IF_ERROR(Find(kActivations, word, &c->activation));
    }
  }
  return Status();
}

}  // namespace

bool IsLattice(DataClass data) {
  return data == DataClass::kLattice || data == DataClass::kLatticeWide ||
         data == DataClass::kLatticeInt8 || data == DataClass::kLatticeSmall;
}

std::string CaseName(const Case& c) {
  return fmt::format("{}/{}/{}/{}/{}/{}/{}_{}/{}/{}/seed{}", NameOf(kChecks, c.check),
                     FormatName(c.format), c.backend, c.kernel, ShapePart(c), WeightPart(c),
                     NameOf(kTypes, c.a_type), NameOf(kTypes, c.c_type), EpiloguePart(c),
                     NameOf(kDataClasses, c.data), c.seed);
}

std::string ProblemName(const Case& c) {
  Case problem = c;
  problem.kernel = "any";
  return CaseName(problem);
}

Result<Case> ParseCase(std::string_view name) {
  const std::vector<std::string_view> parts = Split(name, '/');
  if (parts.size() != 10 || (parts[2] != "cpu" && parts[2] != "cuda" && parts[2] != "metal")) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("case: expected check/format/cpu|cuda|metal/kernel/shape/weights/types/"
                    "epilogue/data/seed, got '{}'",
                    name));
  }
  Case c;
  MARLIN_RETURN_IF_ERROR(Find(kChecks, parts[0], &c.check));
  MARLIN_ASSIGN_OR_RETURN(c.format, ParseFormat(parts[1]));
  c.backend = parts[2];
  c.kernel = parts[3];
  MARLIN_RETURN_IF_ERROR(ParseShape(parts[4], &c));
  MARLIN_RETURN_IF_ERROR(ParseWeightPart(parts[5], &c));
  const std::vector<std::string_view> types = Split(parts[6], '_');
  if (types.size() != 2) {
    return Status(Code::kInvalidArgument, fmt::format("case: bad types '{}'", parts[6]));
  }
  MARLIN_RETURN_IF_ERROR(Find(kTypes, types[0], &c.a_type));
  MARLIN_RETURN_IF_ERROR(Find(kTypes, types[1], &c.c_type));
  MARLIN_RETURN_IF_ERROR(ParseEpilogue(parts[7], &c));
  MARLIN_RETURN_IF_ERROR(Find(kDataClasses, parts[8], &c.data));
  int64_t seed = 0;
  MARLIN_RETURN_IF_ERROR(ParseNumber(parts[9], "seed", &seed));
  c.seed = static_cast<uint64_t>(seed);
  return c;
}

}  // namespace marlin::conformance
