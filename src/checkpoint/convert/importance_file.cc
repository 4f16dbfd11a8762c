// Importance matrices as files; docs/howto/quantize.md says which.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "base/checked.h"
#include "base/json.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "checkpoint/readers/gguf/gguf_file.h"
#include "checkpoint/writers/gguf_metadata.h"
#include "marlin/importance.h"

namespace marlin {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 30;
constexpr std::string_view kSums = ".in_sum2";
constexpr std::string_view kCounts = ".counts";
constexpr uint32_t kGgufF32 = 0;
/// Tokens of a window of a calibration text.
constexpr int64_t kChunkTokens = 256;

Status Malformed(const std::string& file, const std::string& what) {
  return Status(Code::kMalformedFile, fmt::format("{}: {}", file, what));
}

std::vector<float> FloatsAt(std::string_view bytes, int64_t offset, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  std::memcpy(values.data(), bytes.data() + offset, static_cast<size_t>(count) * sizeof(float));
  return values;
}

/// Sums of squares to means. A count of 0 leaves zeros.
Status ToMeans(const std::string& where, ImportanceMatrix::Inputs* inputs) {
  for (const float count : inputs->counts) {
    if (!std::isfinite(count) || count < 0.0F) {
      return Malformed(where, fmt::format("a count of {}, expected at least 0", count));
    }
  }
  for (size_t i = 0; i < inputs->mean_squares.size(); ++i) {
    float& value = inputs->mean_squares[i];
    if (!std::isfinite(value) || value < 0.0F) {
      return Malformed(where, fmt::format("a sum of squares of {}, expected at least 0", value));
    }
    const float count = inputs->counts[i / static_cast<size_t>(inputs->k)];
    value = count > 0.0F ? value / count : 0.0F;
    // A tiny count.
    if (!std::isfinite(value)) return Malformed(where, "a mean square overflows");
  }
  return {};
}

/// The tokens that the input that saw most of them saw.
int64_t MostTokens(const ImportanceMatrix& matrix) {
  float most = 0;
  for (const auto& [name, entry] : matrix.inputs) {
    for (const float count : entry.counts) most = std::max(most, count);
  }
  // The file's field has 32 bits.
  return static_cast<int64_t>(std::min(most, 4e9F));
}

class GgufReader {
 public:
  GgufReader(std::string_view bytes, const std::string& file) : bytes_(bytes), file_(file) {}

  Result<ImportanceMatrix> Read() {
    MARLIN_ASSIGN_OR_RETURN(const GgufFile parsed, ParseGguf(bytes_, file_));
    if (parsed.metadata.Text("general.type") != "imatrix") {
      return Malformed(file_, "general.type: expected imatrix");
    }
    for (const GgufTensor& tensor : parsed.tensors) tensors_.emplace(tensor.name, &tensor);
    ImportanceMatrix matrix;
    for (const auto& [name, tensor] : tensors_) {
      if (name.ends_with(kCounts)) {
        const std::string sums = std::string(Stem(name, kCounts)) + std::string(kSums);
        if (!tensors_.contains(sums)) return Missing(sums);
        continue;
      }
      if (!name.ends_with(kSums)) {
        return Malformed(file_, fmt::format("tensor \"{}\": expected names that end in {} or {}",
                                            Printable(name), kSums, kCounts));
      }
      MARLIN_ASSIGN_OR_RETURN(matrix.inputs[std::string(Stem(name, kSums))], Inputs(*tensor));
    }
    return matrix;
  }

 private:
  static std::string_view Stem(std::string_view name, std::string_view end) {
    return name.substr(0, name.size() - end.size());
  }
  Status Missing(const std::string& name) const {
    return Malformed(file_, fmt::format("tensor \"{}\" is missing", Printable(name)));
  }

  Result<ImportanceMatrix::Inputs> Inputs(const GgufTensor& sums) const {
    const std::string name = std::string(Stem(sums.name, kSums)) + std::string(kCounts);
    const auto counts = tensors_.find(name);
    if (counts == tensors_.end()) return Missing(name);
    const std::string where = fmt::format("{}: tensor \"{}\"", file_, Printable(sums.name));
    for (const GgufTensor* const tensor : {&sums, counts->second}) {
      if (tensor->type != kGgufF32) return Malformed(where, "expected F32");
    }
    ImportanceMatrix::Inputs inputs;
    const int rank = sums.dims.rank();
    inputs.k = rank == 0 ? 0 : sums.dims[rank - 1];
    inputs.experts = inputs.k == 0 ? 0 : sums.dims.ElementCount() / inputs.k;
    const int64_t counted = counts->second->dims.ElementCount();
    if (rank < 1 || rank > 2 || inputs.k == 0 || counted != inputs.experts) {
      return Malformed(where, fmt::format("{} sums, and {} counts", sums.dims.ToString(), counted));
    }
    inputs.mean_squares = FloatsAt(bytes_, sums.offset, sums.dims.ElementCount());
    inputs.counts = FloatsAt(bytes_, counts->second->offset, counted);
    MARLIN_RETURN_IF_ERROR(ToMeans(where, &inputs));
    return inputs;
  }

  std::string_view bytes_;
  const std::string& file_;
  std::map<std::string_view, const GgufTensor*, std::less<>> tensors_;
};

/// The older form: a count of entries; for each a name after its length, the number of calls, the
/// number of values, and the values, means times calls. A chunk number and the dataset may follow.
class BinaryReader {
 public:
  BinaryReader(std::string_view bytes, const std::string& file) : bytes_(bytes), file_(file) {}

  Result<ImportanceMatrix> Read() {
    MARLIN_ASSIGN_OR_RETURN(const int64_t entries, Number("number of entries", 1));
    ImportanceMatrix matrix;
    for (int64_t i = 0; i < entries; ++i) {
      MARLIN_ASSIGN_OR_RETURN(const int64_t length, Number("length of a name", 1));
      if (length > Left()) return Short("a name", length);
      const std::string name(bytes_.substr(static_cast<size_t>(at_), static_cast<size_t>(length)));
      at_ += length;
      MARLIN_ASSIGN_OR_RETURN(const int64_t calls, Number("number of calls", 0));
      MARLIN_ASSIGN_OR_RETURN(const int64_t values, Number("number of values", 1));
      if (values > Left() / static_cast<int64_t>(sizeof(float))) return Short("values", values);
      ImportanceMatrix::Inputs inputs;
      inputs.k = values;
      inputs.counts = {static_cast<float>(calls)};
      inputs.mean_squares = FloatsAt(bytes_, at_, values);
      at_ += values * static_cast<int64_t>(sizeof(float));
      const std::string where = fmt::format("{}: \"{}\"", file_, Printable(name));
      MARLIN_RETURN_IF_ERROR(ToMeans(where, &inputs));
      if (!matrix.inputs.emplace(name, std::move(inputs)).second) {
        return Malformed(where, "is there twice");
      }
    }
    return matrix;
  }

 private:
  int64_t Left() const { return static_cast<int64_t>(bytes_.size()) - at_; }
  Status Short(const char* what, int64_t wanted) const {
    return Malformed(file_, fmt::format("at byte {}: {} of {}, but {} bytes are left", at_, what,
                                        wanted, Left()));
  }
  Result<int64_t> Number(const char* what, int64_t least) {
    int32_t number = 0;
    if (Left() < static_cast<int64_t>(sizeof(number))) {
      return Malformed(file_, fmt::format("ends at byte {}, before the {}", bytes_.size(), what));
    }
    std::memcpy(&number, bytes_.data() + at_, sizeof(number));
    if (number < least) {
      return Malformed(file_, fmt::format("at byte {}: {}: expected at least {}, got {}", at_, what,
                                          least, number));
    }
    at_ += static_cast<int64_t>(sizeof(number));
    return int64_t{number};
  }

  std::string_view bytes_;
  const std::string& file_;
  int64_t at_ = 0;
};

}  // namespace

Result<ImportanceMatrix> ImportanceMatrix::FromBytes(std::string_view bytes,
                                                     const std::string& file) {
  return bytes.starts_with("GGUF") ? GgufReader(bytes, file).Read()
                                   : BinaryReader(bytes, file).Read();
}

Result<ImportanceMatrix> ImportanceMatrix::FromFile(const std::string& path) {
  MARLIN_ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path, kMostBytes));
  return FromBytes(bytes, Printable(path));
}

std::string ImportanceMatrix::ToGguf(const std::string& dataset) const {
  constexpr int64_t kAlignment = 32;
  GgufMetadataBuilder metadata;
  metadata.Text("general.type", "imatrix");
  metadata.Texts("imatrix.datasets", {&dataset, 1});
  // llama.cpp refuses files without these two, and only prints them.
  metadata.Count("imatrix.chunk_count", CeilDivide(MostTokens(*this), kChunkTokens));
  metadata.Count("imatrix.chunk_size", kChunkTokens);
  std::string infos;
  std::string data;
  const auto add = [&](const std::string& name, int64_t rows, int64_t width,
                       const std::vector<float>& values) {
    AppendGgufText(name, &infos);
    AppendGgufNumber(uint32_t{2}, &infos);
    AppendGgufNumber(static_cast<uint64_t>(width), &infos);
    AppendGgufNumber(static_cast<uint64_t>(rows), &infos);
    AppendGgufNumber(kGgufF32, &infos);
    AppendGgufNumber(static_cast<uint64_t>(data.size()), &infos);
    for (const float value : values) AppendGgufNumber(value, &data);
    data.resize(static_cast<size_t>(RoundUp(static_cast<int64_t>(data.size()), kAlignment)));
  };
  for (const auto& [name, entry] : inputs) {
    std::vector<float> sums = entry.mean_squares;
    for (size_t i = 0; i < sums.size(); ++i) {
      sums[i] *= entry.counts[i / static_cast<size_t>(entry.k)];
    }
    add(name + std::string(kSums), entry.experts, entry.k, sums);
    add(name + std::string(kCounts), entry.experts, 1, entry.counts);
  }
  std::string file;
  AppendGgufStart(2 * inputs.size(), metadata.count(), &file);
  file += metadata.bytes() + infos;
  file.resize(static_cast<size_t>(RoundUp(static_cast<int64_t>(file.size()), kAlignment)));
  return file + data;
}

std::string ImportanceMatrix::SummaryJson() const {
  nlohmann::ordered_json document = {{"inputs", nlohmann::ordered_json::array()}};
  for (const auto& [name, entry] : inputs) {
    double sum = 0;
    for (const float square : entry.mean_squares) sum += square;
    const auto seen = entry.experts - std::count(entry.counts.begin(), entry.counts.end(), 0.0F);
    document["inputs"].push_back(
        {{"name", Printable(name)},
         {"experts", entry.experts},
         {"k", entry.k},
         {"counts", entry.counts},
         {"mean_square", seen == 0 ? 0.0 : sum / static_cast<double>(seen * entry.k)}});
  }
  return document.dump();
}

}  // namespace marlin
