// The tensors of a GGUF file, or of its shards, by name.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files/tensor_store.h"
#include "checkpoint/readers/gguf/gguf_blocks.h"
#include "checkpoint/readers/gguf/gguf_file.h"
#include "checkpoint/readers/gguf/gguf_names.h"
#include "checkpoint/readers/gguf/gguf_row_places.h"
#include "checkpoint/readers/gguf/gguf_rows.h"
#include "marlin/status.h"

namespace marlin {

/// A tensor of one of the files, and what it is elsewhere.
struct GgufFileTensor {
  const GgufTensor* tensor = nullptr;
  size_t file = 0;
  GgufStored stored;
  GgufPlace place;
  std::vector<GgufPlace> others;  ///< Where else a tensor belongs that is several elsewhere.
};

class GgufTensorList {
 public:
  explicit GgufTensorList(TensorStore& store) : store_(store) {}

  /// Parses the store's files. Errors: kMalformedFile, kUnsupported.
  Status Read();

  /// Not known: the names mean what they say.
  const GgufNaming& naming() const { return naming_; }
  const GgufMetadata& metadata() const { return files_.front().metadata; }
  const std::map<std::string_view, GgufFileTensor>& tensors() const { return tensors_; }

  const std::byte* Data(const GgufFileTensor& tensor) const;
  /// All values of a small fp32 tensor.
  Result<std::vector<float>> Floats(const GgufFileTensor& tensor) const;
  /// Sets the size of the rows, and the order of rows and columns.
  Status SetRows(const GgufFileTensor& tensor, GgufRows* rows) const;
  /// The names of the fp32 factors of NVFP4, which lie in tensors of their own.
  static std::vector<std::string> ScaleNames(const GgufFileTensor& tensor);
  /// The factors of an NVFP4 tensor; empty: none.
  Result<std::vector<float>> FactorsOf(const GgufFileTensor& tensor) const;

  Status Fail(const std::string& message, Code code = Code::kMalformedFile) const;
  Status FailTensor(const GgufFileTensor& tensor, const std::string& message) const;

 private:
  Status ParseFiles();
  Status ListTensors();
  std::optional<int64_t> Number(std::string_view key) const;
  /// The heads of queries, or of keys, of a tensor's layer.
  Result<int64_t> HeadsOf(const GgufFileTensor& tensor, bool queries) const;
  GgufHeads DeltaHeads() const;
  Status SetPlaces(const GgufFileTensor& tensor, bool by_element, GgufRows* rows) const;

  TensorStore& store_;
  std::vector<GgufFile> files_;
  GgufNaming naming_;
  std::map<std::string_view, GgufFileTensor> tensors_;  ///< By name in the files.
};

}  // namespace marlin
