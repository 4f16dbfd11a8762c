// Loads the tensors of a checkpoint as projections and vectors, prepared for a device.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "model/prepared_file.h"
#include "model/projection.h"

namespace marlin {

/// One matrix of a projection.
struct MatrixRequest {
  std::string name;  ///< The tensor's: "model.layers.0.mlp.up_proj.weight".
  int64_t out = 0;
  /// Index of the expert in a tensor that stacks `experts` of them; -1: the tensor is one matrix.
  int64_t expert = -1;
  int64_t experts = 1;
  bool interleaved = false;  ///< Reorder columns: even ones first, then odd ones.
  bool folded = false;       ///< Load weights with an input transform as plain fp32.
};

/// Matrices that take the place of a checkpoint's: by tensor name, and expert for tensors that
/// stack them, otherwise -1.
using ReplacedMatrices = std::map<std::pair<std::string, int64_t>, QuantizedWeights>;

/// Seconds that the matrices of projections spent in each stage of a load.
struct LoadSeconds {
  double read = 0;  ///< Found in the checkpoint, converted where it stores another layout, checked.
  double prepare = 0;  ///< Copied to the device, or to the device's layout.
  double wait = 0;     ///< Until the device had finished.
};

/// The quantized modules of a checkpoint.
using ModulesByName = std::map<std::string, const QuantizedModule*, std::less<>>;

/// Tensors and modules that were requested, by source name.
struct UsedTensors {
  std::set<std::string, std::less<>> names;
  int64_t parameters = 0;
};

class WeightSource {
 public:
  /// Checkpoint and device must outlive this. Projections are loaded from `prepared` if given;
  /// otherwise they are written to `write` if given, and not kept. Times are added to `seconds` if
  /// given.
  WeightSource(const Checkpoint& checkpoint, const Device& device, std::string model_type,
               std::shared_ptr<const PreparedFile> prepared = nullptr,
               PreparedFileWriter* write = nullptr, LoadSeconds* seconds = nullptr);

  /// From here on loads these instead; they must outlive this.
  void Replace(const ReplacedMatrices* replaced) { replaced_ = replaced; }

  /// Prepares the following weights for this device, which must outlive the source.
  void PrepareFor(const Device& device) { device_ = &device; }

  /// True when a weight of this name exists, plain or quantized.
  bool Has(const std::string& name) const;

  /// About the bytes of an expert's matrix of this name on a device, or of one expert's in a stack;
  /// 0 for one that is missing.
  int64_t BytesOf(const std::string& name) const;

  /// Matrices [in, out...] concatenated along n, joined into one if their formats allow; not to be
  /// used before Finish. Errors: kMalformedFile naming a tensor that is missing or has another
  /// shape.
  Result<Projection> Load(std::span<const MatrixRequest> matrices, int64_t in);
  /// Waits until all projections loaded for the device can be used. Errors: kDeviceLost.
  Status Finish();

  /// A plain tensor of this shape as fp32.
  Result<std::vector<float>> LoadVector(const std::string& name, const Shape& shape) {
    return LoadElements(name, shape, 0, shape.ElementCount());
  }
  /// A vector as fp32; with `rows`, row `row` of a matrix.
  Result<std::vector<float>> LoadVector(const std::string& name, int64_t count, int64_t row = 0,
                                        int64_t rows = 0);

  /// A plain tensor of this shape, in place.
  Result<TensorView> LoadInPlace(const std::string& name, const Shape& shape);

  /// Finds a matrix, or a plain tensor of this shape, that nothing reads. Errors: as Load.
  Status Expect(const MatrixRequest& matrix, int64_t in) { return Locate(matrix, in).status(); }
  Status Expect(const std::string& name, const Shape& s) { return FindTensor(name, s).status(); }
  /// Goes on after another source, whose tensors are used and counted.
  void Follow(const WeightSource& before) { used_ = before.used_; }
  /// Marks a tensor as used although this model does not need it.
  void Ignore(const std::string& name) { used_.names.insert(name); }
  /// Errors: kMalformedFile naming a tensor that was never requested.
  Status CheckAllUsed() const;

  int64_t parameters() const { return used_.parameters; }
  int64_t bytes() const { return bytes_; }
  const Checkpoint& checkpoint() const { return checkpoint_; }

 private:
  /// The location and spec of a requested matrix.
  struct Matrix {
    const QuantizedModule* module = nullptr;  ///< Null: a plain tensor.
    int64_t expert = -1;                      ///< Index in a stacked module or tensor.
    bool in_out = false;                      ///< A plain tensor [in, out].
    WeightsSpec spec;
  };
  /// Some elements of a plain tensor of this shape, as fp32.
  Result<std::vector<float>> LoadElements(const std::string& name, const Shape& shape,
                                          int64_t first, int64_t count);
  Result<Matrix> Locate(const MatrixRequest& request, int64_t in);
  Result<Matrix> LocatePlain(const MatrixRequest& request, int64_t in);
  Result<Matrix> LocateInModule(const QuantizedModule& module, int64_t expert,
                                const MatrixRequest& request, int64_t in);
  Result<QuantizedWeights> LoadMatrix(const MatrixRequest& request, int64_t in);
  Result<Projection> LoadPrepared(std::span<const MatrixRequest> matrices, int64_t in);
  Result<const TensorInfo*> FindTensor(const std::string& name, const Shape& shape);
  Status AddPart(std::span<const QuantizedWeights> matrices,
                 std::span<const MatrixRequest> requests, Projection* projection);

  const Checkpoint& checkpoint_;
  const Device* device_;
  std::string model_type_;
  std::shared_ptr<const PreparedFile> prepared_;
  PreparedFileWriter* write_ = nullptr;
  LoadSeconds* seconds_ = nullptr;
  const ReplacedMatrices* replaced_ = nullptr;
  ModulesByName modules_;
  std::map<std::string, QuantizedWeights> loaded_;  ///< Stacked modules.
  UsedTensors used_;
  int64_t bytes_ = 0;
};

}  // namespace marlin
