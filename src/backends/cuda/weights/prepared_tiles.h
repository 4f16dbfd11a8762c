// Prepared weights on a CUDA device: tiles where the format and its groups allow, otherwise
// the canonical arrays; or, on request, 4-bit codes in the public marlin_w4 layout.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/tile_layout.h"
#include "backends/cuda/runtime/device_memory.h"
#include "plan/gemm/backend.h"

namespace marlin::cuda {

/// Checks that weights can be prepared in the marlin_w4 layout. Errors: kUnsupported with the
/// reason.
Status CheckMarlinW4(const WeightsSpec& spec, bool can_tile);

struct ExpertRanges;
class WeightUpload;

class PreparedTiles : public PreparedWeights::Storage {
 public:
  /// Sends joined columns to the device and rearranges them there; with marlin_w4, the columns are
  /// one whole matrix. The columns may be freed at once; the result may be read once upload.Finish
  /// returns. Errors:
  /// kOutOfMemory, kDeviceLost, kNonFiniteInput as SendPieces, kUnsupported for dimensions beyond a
  /// grid's, and for weights that marlin_w4 or its kernel cannot represent.
  static Result<std::shared_ptr<const PreparedTiles>> Make(std::span<const WeightColumns> columns,
                                                           const PrepareOptions& options,
                                                           const Backend* backend,
                                                           WeightUpload& upload);

  CodeKind kind() const { return kind_; }
  TileKind tile_kind() const { return {kind_, traits.sparse}; }
  /// Precondition: tiled or marlin_w4; of the latter, it describes the codes.
  TileView Tiles(int64_t expert) const;
  /// The view of the dense tiles that hold the same weights, without their address.
  /// Precondition: traits.sparse.
  TileView Expanded(int64_t expert) const;
  /// The code of value 0. Precondition: traits.sparse.
  uint32_t zero_code() const { return zero_code_; }
  /// Precondition: marlin_w4.
  MarlinW4View MarlinW4(int64_t expert) const;
  /// Precondition: neither tiled nor marlin_w4.
  CanonicalView Canonical(int64_t expert) const;

 private:
  // `model` has the codebook, the types and the global scales of all columns.
  void DescribeCanonical(const QuantizedWeights& model);
  void DescribeTiles(const QuantizedWeights& model, std::span<const ExpertRanges> ranges);
  Status MakeTables(const QuantizedWeights& model, WeightUpload& upload);
  Status SendTiles(std::span<const WeightColumns> columns, WeightUpload& upload);
  Status SendCanonical(std::span<const WeightColumns> columns, WeightUpload& upload);
  Status UploadMarlinW4(const QuantizedWeights& weights,
                        const std::shared_ptr<DeviceHandle>& device);

  CodeKind kind_ = CodeKind::kFp4;
  TileView tiles_;           ///< View of expert 0.
  CanonicalView canonical_;  ///< View of expert 0.
  uint32_t zero_code_ = 0;
  int64_t expert_bytes_ = 0;  ///< One expert: its tiles, or its marlin_w4 words and parameters.
  int64_t words_bytes_ = 0;   ///< One expert of the canonical arrays.
  int64_t scales_bytes_ = 0;
  int64_t zeros_bytes_ = 0;
  int64_t biases_bytes_ = 0;
  std::vector<int> exponents_;  ///< Each expert's scales were normalized by 2^this.
  std::vector<float> global_scales_;
  DeviceMemory memory_;
  std::shared_ptr<const DeviceMemory> tables_;  ///< CodeTables.
};

}  // namespace marlin::cuda
