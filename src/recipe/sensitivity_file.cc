// Sensitivities as files; docs/howto/quantize.md documents the schema.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "base/checked.h"
#include "base/json.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "marlin/sensitivity.h"

namespace marlin {
namespace {

/// Largest dimension of a matrix in a file.
constexpr int64_t kMostElements = int64_t{1} << 31;
constexpr size_t kMostFormats = 64;

Status MalformedSensitivities(const std::string& file, const std::string& what) {
  return Status(Code::kMalformedFile, fmt::format("{}: {}", file, what));
}

Result<std::string> TextAt(const Json& object, const char* key, const std::string& file) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) {
    return MalformedSensitivities(file, fmt::format("{}: expected a string", key));
  }
  return found->get<std::string>();
}

Result<int64_t> CountAt(const Json& object, const char* key, const std::string& file) {
  const auto found = object.find(key);
  if (found != object.end() && found->is_number_unsigned()) {
    const auto number = found->get<uint64_t>();
    if (number >= 1 && number <= static_cast<uint64_t>(kMostElements)) {
      return static_cast<int64_t>(number);
    }
  }
  return MalformedSensitivities(
      file, fmt::format("{}: expected a whole number from 1 to {}, got {}", key, kMostElements,
                        found == object.end() ? "nothing" : DescribeJson(*found)));
}

Result<const Json*> ListAt(const Json& object, const char* key, const std::string& file) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_array()) {
    return MalformedSensitivities(file, fmt::format("{}: expected an array", key));
  }
  return &*found;
}

Status ReadFormats(const Json& list, const std::string& file, std::vector<FormatChoice>* formats) {
  if (list.empty() || list.size() > kMostFormats) {
    return MalformedSensitivities(
        file, fmt::format("formats: expected 1 to {}, got {}", kMostFormats, list.size()));
  }
  for (const Json& entry : list) {
    if (!entry.is_string()) return MalformedSensitivities(file, "formats: expected strings");
    const Result<FormatChoice> choice = ParseFormatChoice(entry.get<std::string>());
    if (!choice.ok()) return MalformedSensitivities(file, "formats: " + choice.status().message());
    if (!choice->quantized()) {
      return MalformedSensitivities(
          file, fmt::format("formats: {} is not quantized", choice->ToString()));
    }
    if (std::find(formats->begin(), formats->end(), *choice) != formats->end()) {
      return MalformedSensitivities(file,
                                    fmt::format("formats: {} is there twice", choice->ToString()));
    }
    formats->push_back(*choice);
  }
  return {};
}

Result<Sensitivity::Matrix> MatrixOf(const Json& entry, size_t formats, const std::string& file) {
  if (!entry.is_object()) return MalformedSensitivities(file, "matrices: expected objects");
  Sensitivity::Matrix matrix;
  MARLIN_ASSIGN_OR_RETURN(matrix.name, TextAt(entry, "name", file));
  const std::string where = fmt::format("{}: \"{}\"", file, Printable(matrix.name));
  MARLIN_ASSIGN_OR_RETURN(matrix.experts, CountAt(entry, "experts", where));
  MARLIN_ASSIGN_OR_RETURN(matrix.k, CountAt(entry, "k", where));
  MARLIN_ASSIGN_OR_RETURN(matrix.n, CountAt(entry, "n", where));
  const Checked count = Checked(matrix.experts) * Checked(matrix.k) * Checked(matrix.n);
  if (!(count * Checked(64)).valid()) return MalformedSensitivities(where, "has too many weights");
  MARLIN_ASSIGN_OR_RETURN(const Json* const list, ListAt(entry, "kl", where));
  if (list->size() != formats) {
    return MalformedSensitivities(
        where,
        fmt::format("kl: expected {} numbers, one per format, got {}", formats, list->size()));
  }
  for (const Json& value : *list) {
    const double kl = value.is_number() ? value.get<double>() : -1.0;
    if (!std::isfinite(kl) || kl < 0.0) {
      return MalformedSensitivities(
          where, fmt::format("kl: expected a number of at least 0, got {}", DescribeJson(value)));
    }
    matrix.kl.push_back(kl);
  }
  return matrix;
}

}  // namespace

std::string Sensitivity::ToJson() const {
  nlohmann::ordered_json document = {
      {"model_type", model_type}, {"identity", identity}, {"tokens", tokens}};
  document["formats"] = nlohmann::ordered_json::array();
  for (const FormatChoice& choice : formats) document["formats"].push_back(choice.ToString());
  document["matrices"] = nlohmann::ordered_json::array();
  for (const Matrix& matrix : matrices) {
    document["matrices"].push_back({{"name", matrix.name},
                                    {"experts", matrix.experts},
                                    {"k", matrix.k},
                                    {"n", matrix.n},
                                    {"kl", matrix.kl}});
  }
  return document.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Result<Sensitivity> Sensitivity::FromJson(std::string_view text, const std::string& file) {
  MARLIN_ASSIGN_OR_RETURN(const Json document, ParseJsonObject(text, file, kSensitivityJson));
  Sensitivity sensitivity;
  MARLIN_ASSIGN_OR_RETURN(sensitivity.model_type, TextAt(document, "model_type", file));
  MARLIN_ASSIGN_OR_RETURN(sensitivity.identity, TextAt(document, "identity", file));
  MARLIN_ASSIGN_OR_RETURN(sensitivity.tokens, CountAt(document, "tokens", file));
  MARLIN_ASSIGN_OR_RETURN(const Json* const formats, ListAt(document, "formats", file));
  MARLIN_RETURN_IF_ERROR(ReadFormats(*formats, file, &sensitivity.formats));
  MARLIN_ASSIGN_OR_RETURN(const Json* const matrices, ListAt(document, "matrices", file));
  std::set<std::string, std::less<>> names;
  for (const Json& entry : *matrices) {
    MARLIN_ASSIGN_OR_RETURN(Matrix matrix, MatrixOf(entry, sensitivity.formats.size(), file));
    if (!names.insert(matrix.name).second) {
      return MalformedSensitivities(file,
                                    fmt::format("\"{}\": is there twice", Printable(matrix.name)));
    }
    sensitivity.matrices.push_back(std::move(matrix));
  }
  return sensitivity;
}

Result<Sensitivity> Sensitivity::FromFile(const std::string& path) {
  MARLIN_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kSensitivityJson.bytes));
  return FromJson(text, Printable(path));
}

std::vector<FormatChoice> DefaultSensitivityFormats() {
  std::vector<FormatChoice> formats;
  for (const char* const text : {"int2/g64/frac", "nf3/g64", "nf4/g64", "s8/g64"}) {
    formats.push_back(*ParseFormatChoice(text));
  }
  return formats;
}

}  // namespace marlin
