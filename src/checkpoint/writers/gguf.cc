// GGUF, version 3: one file with the metadata of the model and its tokenizer, or shards, of which
// the first has these metadata and all have their place among the shards. Quantized modules
// keep their codes, in the block type that holds them (gguf_blocks.h), and two levels of scales
// where one has such (gguf_super_blocks.h); vectors and routers are widened to fp32, as programs
// that run these files expect them.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/codes/unpack.h"
#include "checkpoint/convert/conversion.h"
#include "checkpoint/module_writer.h"
#include "checkpoint/readers/gguf/gguf_names.h"
#include "checkpoint/writers/gguf_blocks.h"
#include "checkpoint/writers/gguf_metadata.h"
#include "checkpoint/writers/gguf_super_blocks.h"
#include "layout/input_transform.h"
#include "layout/parameters.h"
#include "layout/plain_weights.h"
#include "layout/slice_expert.h"
#include "marlin/layout.h"
#include "marlin/quantize.h"

namespace marlin {
namespace {

constexpr int64_t kAlignment = 32;
constexpr const char* kSingleFile = "model.gguf";  // Its name until it is renamed.
constexpr size_t kMostNameBytes = 63;
constexpr size_t kMostShards = 65535;  // split.count has 16 bits.
constexpr std::string_view kWeight = ".weight";
constexpr std::string_view kExperts = ".experts.";

/// gpt-oss: the rows of gate are the even ones of the source, those of up the odd ones.
enum class Rows : uint8_t { kAll, kEven, kOdd };

/// One tensor of the file and where its values come from.
struct GgufOutput {
  std::string name;
  GgufStored type;
  Shape dims;          ///< In C order.
  int64_t offset = 0;  ///< From the beginning of the data.
  int64_t bytes = 0;
  int64_t head_dim = 0;                  ///< Not 0: rows are stored in the order of HeadRow.
  Rows rows = Rows::kAll;                ///< Those of the source that the tensor holds.
  bool in_out = false;                   ///< The source stores each matrix as [in, out].
  const ModuleRecord* record = nullptr;  ///< The module, or null.
  std::vector<size_t> tensors;           ///< Tensors of the source, one for each expert.
  std::vector<float> values;             ///< Values that no tensor of the source holds.
  bool global_scale = false;             ///< The factors of the module.
};

/// One file of the output.
struct GgufShard {
  std::string name;
  size_t first = 0;  ///< Its first tensor.
  size_t end = 0;
  std::string header;
};

/// "a.experts.7.b" as "a.experts.*.b", and 7.
std::optional<int64_t> TakeExpert(std::string* name) {
  const size_t at = name->find(kExperts);
  if (at == std::string::npos) return std::nullopt;
  const size_t begin = at + kExperts.size();
  const size_t end = name->find('.', begin);
  if (end == std::string::npos || end == begin || end - begin > 6) return std::nullopt;
  int64_t number = 0;
  for (size_t i = begin; i < end; ++i) {
    const char digit = (*name)[i];
    if (digit < '0' || digit > '9') return std::nullopt;
    number = number * 10 + (digit - '0');
  }
  name->replace(begin, end - begin, "*");
  return number;
}

class GgufExport {
 public:
  GgufExport(Io& io, const Checkpoint& checkpoint, const ContainerOutput& output)
      : io_(io),
        checkpoint_(checkpoint),
        source_(CheckpointAccess::Get(checkpoint)),
        output_(output) {}

  Status Plan() {
    MARLIN_ASSIGN_OR_RETURN(
        facts_, DescribeGgufModel(source_.config_json, Printable(source_.path), &metadata_));
    for (const ModuleRecord& record : source_.reader->modules()) {
      MARLIN_RETURN_IF_ERROR(InModule(record, PlanModule(record)));
    }
    MARLIN_RETURN_IF_ERROR(PlanPlain());
    std::stable_sort(
        outputs_.begin(), outputs_.end(),
        [this](const GgufOutput& a, const GgufOutput& b) { return Place(a) < Place(b); });
    if (!facts_.rope_factors.empty()) {
      GgufOutput factors;
      factors.name = "rope_freqs.weight";
      factors.dims = {static_cast<int64_t>(facts_.rope_factors.size())};
      factors.values = facts_.rope_factors;
      MARLIN_RETURN_IF_ERROR(Add(std::move(factors), *FindGgufType(DType::kF32)));
    }
    MARLIN_RETURN_IF_ERROR(AddTokenizer());
    return LayOut();
  }

  /// Whether modules have a form in the file, judged by their records.
  Status Check(std::span<const ModuleRecord> records) {
    MARLIN_ASSIGN_OR_RETURN(
        facts_, DescribeGgufModel(source_.config_json, Printable(source_.path), &metadata_));
    for (const ModuleRecord& record : records) {
      const WeightsSpec& spec = record.module.spec;
      const bool fused = HoldsFused(record.stacked, record.layout == SourceLayout::kInOut);
      if (!fused) MARLIN_RETURN_IF_ERROR(CheckForeignLayout(record));
      GgufOutput output;
      MARLIN_RETURN_IF_ERROR(SetPlace(record.module.name, spec.n, &output));
      const WeightsSpec stored = TransformsInput(spec) ? FoldedSpec(spec) : FlatSpec(spec);
      MARLIN_RETURN_IF_ERROR(GgufTypeOf(stored).status());
    }
    return {};
  }

  Status Write(OutputDirectory* directory) {
    for (const GgufShard& shard : shards_) MARLIN_RETURN_IF_ERROR(WriteShard(shard, directory));
    return {};
  }

  std::vector<SkippedTensor> TakeFiles() { return std::move(files_); }

 private:
  Status WriteShard(const GgufShard& shard, OutputDirectory* directory) {
    MARLIN_ASSIGN_OR_RETURN(file_, io_.Create(JoinPath(directory->path(), shard.name)));
    data_begin_ = static_cast<int64_t>(shard.header.size());
    for (size_t i = shard.first; i < shard.end; ++i) {
      const GgufOutput& output = outputs_[i];
      MARLIN_RETURN_IF_ERROR(WriteTensor(output));
      const int64_t padding = RoundUp(output.bytes, kAlignment) - output.bytes;
      const std::array<std::byte, kAlignment> zeros{};
      MARLIN_RETURN_IF_ERROR(WriteAt(output, output.bytes, zeros.data(), padding));
      done_ += output.dims.ElementCount();
      if (output_.progress) output_.progress(done_, total_);
    }
    // The header comes last: a file that has one is complete.
    MARLIN_RETURN_IF_ERROR(
        io_.Write(file_, 0, shard.header.data(), static_cast<int64_t>(shard.header.size())));
    MARLIN_ASSIGN_OR_RETURN(const FileInfo written, io_.SyncAndClose(std::move(file_)));
    directory->AddWritten(shard.name, written);
    return {};
  }

  Status Fail(std::string_view what, const std::string& name, const Status& status) const {
    return status.WithContext(
        fmt::format("{}: {} \"{}\"", Printable(source_.path), what, Printable(name)));
  }
  Status InModule(const ModuleRecord& record, const Status& status) const {
    return status.ok() ? status : Fail("module", record.module.name, status);
  }
  Status InTensor(size_t tensor, const Status& status) const {
    return status.ok() ? status : Fail("tensor", source_.tensors[tensor].name, status);
  }

  std::pair<uint32_t, int64_t> Place(const GgufOutput& output) const {
    const size_t tensor = output.record != nullptr
                              ? source_.reader->Parts(*output.record).front().tensor
                              : output.tensors.front();
    return {source_.tensor_file[tensor], source_.tensors[tensor].offset};
  }

  /// Sets the name, and the order of the rows of q and k.
  Status SetPlace(const std::string& name, int64_t rows, GgufOutput* output) const {
    const auto found = GgufTensorName(*facts_.architecture, facts_.with_experts, name);
    if (!found) {
      return Status(Code::kUnsupported,
                    fmt::format("gguf has no name for it in a model of the architecture {}",
                                facts_.architecture->name));
    }
    output->name = *found;
    const GgufPlace place =
        PlaceGgufTensor(*facts_.architecture, facts_.with_experts, output->name);
    if (place.rows == GgufPlace::Rows::kStraight) return {};
    const bool queries = place.rows == GgufPlace::Rows::kQueryHeads;
    const int64_t heads = queries ? facts_.heads : facts_.kv_heads;
    if (rows % heads != 0 || rows / heads % 2 != 0) {
      return Status(Code::kMalformedFile,
                    fmt::format("{} rows are not {} heads of even size", rows, heads));
    }
    output->head_dim = rows / heads;
    return {};
  }

  Status Add(GgufOutput output, const GgufStored& type) {
    output.type = type;
    output.bytes = output.dims.ElementCount() / type.elements * type.bytes;
    if (output.name.size() > kMostNameBytes) {
      return Status(Code::kUnsupported,
                    fmt::format("gguf cannot hold the name {} of {} bytes, at most {}",
                                Printable(output.name), output.name.size(), kMostNameBytes));
    }
    if (!names_.insert(output.name).second) {
      return Status(Code::kMalformedFile,
                    fmt::format("two tensors would both be \"{}\"", Printable(output.name)));
    }
    total_ += output.dims.ElementCount();
    outputs_.push_back(std::move(output));
    return {};
  }

  /// Whether experts lie in one tensor, as [in, out], which this architecture's files hold.
  bool HoldsFused(bool stacked, bool in_out) const {
    return facts_.architecture->model_type == "gpt_oss" && stacked && in_out;
  }

  /// The tensors that hold an output, whose dimension `rows` counts its rows: one, or for gate and
  /// up of gpt-oss two.
  Result<std::vector<GgufOutput>> Split(GgufOutput output, int rows) const {
    std::vector<GgufOutput> parts = {std::move(output)};
    const auto partner = GgufInterleavedPartner(*facts_.architecture, parts.front().name);
    if (!partner) return parts;
    GgufOutput& gate = parts.front();
    if (gate.dims[rows] % 2 != 0) {
      return Status(Code::kMalformedFile,
                    fmt::format("{} rows are not gate and up in turn", gate.dims[rows]));
    }
    Shape half;
    for (int i = 0; i < gate.dims.rank(); ++i) {
      half.Append(i == rows ? gate.dims[i] / 2 : gate.dims[i]);
    }
    gate.dims = half;
    gate.rows = Rows::kEven;
    parts.push_back(gate);
    parts.back().name = *partner;
    parts.back().rows = Rows::kOdd;
    return parts;
  }

  Status PlanModule(const ModuleRecord& record) {
    const bool fused = HoldsFused(record.stacked, record.layout == SourceLayout::kInOut);
    if (!fused) MARLIN_RETURN_IF_ERROR(CheckForeignLayout(record));
    const WeightsSpec& spec = record.module.spec;
    GgufOutput output;
    output.record = &record;
    MARLIN_RETURN_IF_ERROR(SetPlace(record.module.name, spec.n, &output));
    if (record.stacked) output.dims.Append(spec.experts);
    output.dims.Append(spec.n);
    output.dims.Append(spec.k);
    MARLIN_ASSIGN_OR_RETURN(const std::vector<GgufOutput> parts,
                            Split(std::move(output), record.stacked ? 1 : 0));
    MARLIN_ASSIGN_OR_RETURN(const GgufStored type, TypeOf(record));
    for (const GgufOutput& part : parts) MARLIN_RETURN_IF_ERROR(PlanPart(record, part, type));
    return {};
  }

  Result<GgufStored> TypeOf(const ModuleRecord& record) const {
    const WeightsSpec& spec = record.module.spec;
    // No type has groups that lie across k, or scales or rotates its inputs.
    if (TransformsInput(spec)) return GgufTypeOf(FoldedSpec(spec));
    // Whether a type with two levels of scales holds them is seen in the numbers only.
    if (const GgufStored* const type = FindSuperType(spec); type != nullptr) {
      MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights,
                              checkpoint_.Weights(record.module.name));
      const bool held = HoldsSuperBlocks(*type, weights);
      for (const PartTensor& part : source_.reader->Parts(record)) source_.Release(part.tensor);
      if (held) return *type;
    }
    return GgufTypeOf(FlatSpec(spec));
  }

  Status PlanPart(const ModuleRecord& record, GgufOutput output, const GgufStored& type) {
    const WeightsSpec& spec = record.module.spec;
    if (spec.has_global_scale && type.quantized()) {
      GgufOutput factors;
      factors.record = &record;
      factors.name = output.name.substr(0, output.name.size() - kWeight.size()) + ".scale";
      factors.dims = {spec.experts};
      factors.global_scale = true;
      MARLIN_RETURN_IF_ERROR(Add(std::move(factors), *FindGgufType(DType::kF32)));
    }
    return Add(std::move(output), type);
  }

  /// Experts with a tensor each become a stack.
  Status PlanPlain() {
    std::map<std::string, std::map<int64_t, size_t>> stacks;
    for (size_t i = 0; i < source_.tensors.size(); ++i) {
      if (source_.is_part[i]) continue;
      std::string name = source_.tensors[i].name;
      // Models compute these from their configuration.
      if (name.ends_with(".rotary_emb.inv_freq")) continue;
      if (const std::optional<int64_t> expert = TakeExpert(&name)) {
        stacks[name][*expert] = i;
      } else {
        MARLIN_RETURN_IF_ERROR(InTensor(i, PlanTensor(name, {i}, false)));
      }
    }
    for (const auto& [name, experts] : stacks) {
      std::vector<size_t> tensors;
      for (const auto& [expert, tensor] : experts) {
        const TensorInfo& first = source_.tensors[experts.begin()->second];
        const TensorInfo& own = source_.tensors[tensor];
        if (expert != static_cast<int64_t>(tensors.size()) || !(own.shape == first.shape) ||
            own.dtype != first.dtype) {
          return InTensor(tensor, Status(Code::kMalformedFile,
                                         fmt::format("expert {} of {}: numbers, shapes and types "
                                                     "of experts must agree",
                                                     tensors.size(), experts.size())));
        }
        tensors.push_back(tensor);
      }
      MARLIN_RETURN_IF_ERROR(InTensor(tensors.front(), PlanTensor(name, tensors, true)));
    }
    return {};
  }

  Status PlanTensor(const std::string& name, const std::vector<size_t>& tensors, bool stacked) {
    const TensorInfo& info = source_.tensors[tensors.front()];
    const int rank = info.shape.rank();
    GgufOutput output;
    output.tensors = tensors;
    MARLIN_RETURN_IF_ERROR(SetPlace(name, rank == 0 ? 1 : info.shape[0], &output));
    const GgufPlace place = PlaceGgufTensor(*facts_.architecture, facts_.with_experts, output.name);
    const bool fused = place.experts && HoldsFused(true, !stacked);
    if (fused) return PlanFused(info, std::move(output));
    if (place.experts != stacked) {
      return Status(Code::kUnsupported,
                    "one tensor for all experts has no form in gguf, which has one for each "
                    "projection");
    }
    if (rank > (stacked ? 2 : 4) || (place.as_row && (rank != 2 || info.shape[0] != 1))) {
      return Status(Code::kUnsupported, "gguf cannot hold the shape " + info.shape.ToString());
    }
    if (stacked) output.dims.Append(static_cast<int64_t>(tensors.size()));
    for (int i = place.as_row ? 1 : 0; i < rank; ++i) output.dims.Append(info.shape[i]);
    const bool widened = output.dims.rank() < 2 || ClassifyTensor(name) == LayerClass::kMoeRouter;
    return AddPlain(std::move(output), info.dtype, widened);
  }

  /// Adds a tensor of plain values, with `widened` in fp32 if they are floats.
  Status AddPlain(GgufOutput output, DType dtype, bool widened) {
    const bool is_float = dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBf16;
    const GgufStored* const type = FindGgufType(is_float && widened ? DType::kF32 : dtype);
    if (type == nullptr) {
      return Status(Code::kUnsupported,
                    fmt::format("gguf cannot hold {} elements", DTypeName(dtype)));
    }
    return Add(std::move(output), *type);
  }

  /// Experts in one tensor, matrices [experts, in, out] or biases [experts, out].
  Status PlanFused(const TensorInfo& info, GgufOutput output) {
    const int rank = info.shape.rank();
    if (rank != 2 && rank != 3) {
      return Status(Code::kUnsupported, "gguf cannot hold the shape " + info.shape.ToString());
    }
    output.in_out = true;
    output.dims = {info.shape[0], info.shape[rank - 1]};
    if (rank == 3) output.dims.Append(info.shape[1]);
    MARLIN_ASSIGN_OR_RETURN(const std::vector<GgufOutput> parts, Split(std::move(output), 1));
    for (const GgufOutput& part : parts) {
      MARLIN_RETURN_IF_ERROR(AddPlain(part, info.dtype, rank == 2));
    }
    return {};
  }

  Status AddTokenizer() {
    const auto embedding = names_.find("token_embd.weight");
    const auto* const output =
        embedding == names_.end()
            ? nullptr
            : &*std::find_if(outputs_.begin(), outputs_.end(),
                             [&](const GgufOutput& one) { return one.name == *embedding; });
    const auto read = [this](const std::string& name) -> Result<Json> {
      MARLIN_ASSIGN_OR_RETURN(const std::optional<std::string> text, checkpoint_.ReadFile(name));
      if (!text) return Json();
      constexpr JsonLimits kLimits{int64_t{256} << 20, int64_t{1} << 24};
      return ParseJsonObject(*text, Printable(name), kLimits);
    };
    constexpr const char* kFile = "tokenizer.json";
    const Result<Json> tokenizer = read(kFile);
    Result<Json> config = read("tokenizer_config.json");
    // A chat template in a file of its own has precedence.
    MARLIN_ASSIGN_OR_RETURN(const std::optional<std::string> chat,
                            checkpoint_.ReadFile("chat_template.jinja"));
    if (chat && config.ok()) (*config)["chat_template"] = *chat;
    MARLIN_ASSIGN_OR_RETURN(const Json generation, read("generation_config.json"));
    DescribeGgufSampling(generation, &metadata_);
    std::string obstacle;
    if (!tokenizer.ok() || !config.ok()) {
      obstacle = (tokenizer.ok() ? config : tokenizer).status().message();
    } else if (tokenizer->is_null()) {
      obstacle = "the source has none";
    } else if (output == nullptr || output->dims.rank() != 2) {
      obstacle = "the source has no embedding";
    } else {
      obstacle = DescribeGgufTokenizer({*tokenizer, *config, source_.config(), generation},
                                       output->dims[0], &metadata_);
    }
    if (obstacle.empty()) return {};
    files_.push_back({kFile, obstacle});
    DescribeGgufTokenNumbers(source_.config(), generation, &metadata_);
    return {};
  }

  Status LayOut() {
    CutShards();
    if (shards_.size() > kMostShards) {
      return Status(
          Code::kUnsupported,
          fmt::format("{}: {} shards of {} bytes, gguf has at most {}", Printable(source_.path),
                      shards_.size(), output_.shard_bytes, kMostShards));
    }
    for (size_t i = 0; i < shards_.size(); ++i) {
      GgufMetadataBuilder metadata;
      if (i == 0) metadata = metadata_;
      if (output_.shard_bytes > 0) {
        shards_[i].name = fmt::format("model-{:05}-of-{:05}.gguf", i + 1, shards_.size());
        metadata.Split(static_cast<uint16_t>(i), static_cast<uint16_t>(shards_.size()),
                       static_cast<int32_t>(outputs_.size()));
      }
      shards_[i].header = HeaderOf(shards_[i], metadata);
    }
    return {};
  }

  /// Assigns consecutive tensors to files, and places in them.
  void CutShards() {
    shards_ = {{kSingleFile, 0, 0, {}}};
    int64_t offset = 0;
    for (size_t i = 0; i < outputs_.size(); ++i) {
      const int64_t bytes = RoundUp(outputs_[i].bytes, kAlignment);
      if (output_.shard_bytes > 0 && offset > 0 && bytes > output_.shard_bytes - offset) {
        shards_.push_back({{}, i, i, {}});
        offset = 0;
      }
      outputs_[i].offset = offset;
      offset += bytes;
      shards_.back().end = i + 1;
    }
  }

  std::string HeaderOf(const GgufShard& shard, const GgufMetadataBuilder& metadata) const {
    std::string infos;
    for (size_t number = shard.first; number < shard.end; ++number) {
      const GgufOutput& output = outputs_[number];
      AppendGgufText(output.name, &infos);
      AppendGgufNumber(static_cast<uint32_t>(output.dims.rank()), &infos);
      // The file lists the contiguous dimension first.
      for (int i = output.dims.rank(); i-- > 0;) {
        AppendGgufNumber(static_cast<uint64_t>(output.dims[i]), &infos);
      }
      AppendGgufNumber(output.type.id, &infos);
      AppendGgufNumber(static_cast<uint64_t>(output.offset), &infos);
    }
    std::string header;
    AppendGgufStart(shard.end - shard.first, metadata.count(), &header);
    header += metadata.bytes() + infos;
    header.resize(static_cast<size_t>(RoundUp(static_cast<int64_t>(header.size()), kAlignment)));
    return header;
  }

  Status WriteAt(const GgufOutput& output, int64_t at, const void* data, int64_t bytes) {
    if (bytes == 0) return {};
    return io_.Write(file_, data_begin_ + output.offset + at, data, bytes);
  }

  /// Writes rows [first, first + count) of a matrix that begins `at` bytes into the tensor.
  Status WriteRows(const GgufOutput& output, int64_t at, int64_t first, int64_t count,
                   int64_t row_bytes, const std::byte* rows) {
    if (output.head_dim == 0) {
      return WriteAt(output, at + first * row_bytes, rows, count * row_bytes);
    }
    for (int64_t r = 0; r < count; ++r) {
      MARLIN_RETURN_IF_ERROR(WriteAt(output, at + HeadRow(first + r, output.head_dim) * row_bytes,
                                     rows + r * row_bytes, row_bytes));
    }
    return {};
  }

  Status WriteTensor(const GgufOutput& output) {
    if (output.record != nullptr) return InModule(*output.record, WriteModule(output));
    if (!output.values.empty()) {
      return WriteAt(output, 0, output.values.data(), output.bytes);
    }
    if (output.in_out) return WriteFused(output);
    const int64_t bytes = output.bytes / static_cast<int64_t>(output.tensors.size());
    for (size_t i = 0; i < output.tensors.size(); ++i) {
      MARLIN_ASSIGN_OR_RETURN(const LoadedTensor loaded,
                              LoadedTensor::Load(source_, output.tensors[i]));
      MARLIN_RETURN_IF_ERROR(
          WritePlain(output, static_cast<int64_t>(i) * bytes, bytes, loaded.view()));
    }
    return {};
  }

  Status WritePlain(const GgufOutput& output, int64_t at, int64_t bytes, const TensorView& view) {
    const int64_t rows = output.head_dim == 0 || view.rank() == 0 ? 1 : view.dim(0);
    if (bytes == 0) return {};
    if (view.dtype() == output.type.dtype) {
      return WriteRows(output, at, 0, rows, bytes / rows, view.As<std::byte>());
    }
    std::vector<float> values(static_cast<size_t>(view.ElementCount()));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = ParameterAt(view, static_cast<int64_t>(i));
    }
    return WriteRows(output, at, 0, rows, bytes / rows,
                     reinterpret_cast<const std::byte*>(values.data()));
  }

  /// Whether the tensor holds this row of the source.
  static bool Holds(const GgufOutput& output, int64_t row) {
    return output.rows == Rows::kAll || row % 2 == (output.rows == Rows::kOdd ? 1 : 0);
  }

  /// Writes the rows of a matrix [count, row_bytes] that the tensor holds, from `at` on.
  Status WriteHeld(const GgufOutput& output, int64_t at, int64_t count, int64_t row_bytes,
                   std::byte* rows) {
    int64_t held = 0;
    for (int64_t r = 0; r < count; ++r) {
      if (!Holds(output, r)) continue;
      if (held != r) {
        std::memcpy(rows + held * row_bytes, rows + r * row_bytes, static_cast<size_t>(row_bytes));
      }
      ++held;
    }
    return WriteRows(output, at, 0, held, row_bytes, rows);
  }

  /// Matrices [in, out] of one tensor, or biases, become rows.
  Status WriteFused(const GgufOutput& output) {
    MARLIN_ASSIGN_OR_RETURN(const LoadedTensor loaded,
                            LoadedTensor::Load(source_, output.tensors.front()));
    const TensorView& view = loaded.view();
    const int64_t experts = view.dim(0);
    const int64_t k = view.rank() == 3 ? view.dim(1) : 1;
    const int64_t n = view.dim(view.rank() - 1);
    if (view.ElementCount() == 0) return {};
    const int64_t element = DTypeBytes(view.dtype());
    const bool same = view.dtype() == output.type.dtype;
    MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer rows, AlignedBuffer::Allocate(n * k * element));
    std::vector<float> wide(same ? 0 : static_cast<size_t>(n * k));
    for (int64_t e = 0; e < experts; ++e) {
      TransposeElements(view.As<std::byte>() + e * k * n * element, 1, k, n, element, rows.data());
      auto* data = rows.As<std::byte>();
      for (size_t i = 0; i < wide.size(); ++i) {
        wide[i] = ParameterAt(data, view.dtype(), static_cast<int64_t>(i));
      }
      if (!same) data = reinterpret_cast<std::byte*>(wide.data());
      MARLIN_RETURN_IF_ERROR(
          WriteHeld(output, e * (output.bytes / experts), n, k * output.type.bytes, data));
    }
    return {};
  }

  Status WriteModule(const GgufOutput& output) {
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights stored,
                            checkpoint_.Weights(output.record->module.name));
    const bool two_levels = output.type.quantized() && output.type.format->super_group_size > 0;
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights dense,
                            ConvertTo(two_levels ? stored.spec : PlainSpec(stored.spec), stored));
    MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights weights, FoldInput(dense));
    const int64_t bytes = output.bytes / weights.spec.experts;
    for (int64_t e = 0; e < weights.spec.experts; ++e) {
      MARLIN_ASSIGN_OR_RETURN(const QuantizedWeights matrix, SliceExpert(weights, e));
      if (output.global_scale) {
        MARLIN_ASSIGN_OR_RETURN(const float factor, GgufGlobalScale(matrix));
        MARLIN_RETURN_IF_ERROR(WriteAt(output, e * bytes, &factor, sizeof(factor)));
      } else {
        MARLIN_RETURN_IF_ERROR(output.type.quantized() ? WriteBlocks(output, e * bytes, matrix)
                                                       : WriteFloats(output, e * bytes, matrix));
      }
    }
    for (const PartTensor& part : source_.reader->Parts(*output.record)) {
      source_.Release(part.tensor);
    }
    return {};
  }

  Status WriteBlocks(const GgufOutput& output, int64_t at, const QuantizedWeights& matrix) {
    MARLIN_ASSIGN_OR_RETURN(const GgufEncoder encoder, GgufEncoder::Make(matrix, output.type));
    std::vector<uint8_t> rows;
    return ForEachColumns(matrix, encoder.flip(),
                          [&](int64_t first, int64_t count, const uint8_t* codes, int64_t stride) {
                            rows.resize(static_cast<size_t>(count * encoder.row_bytes()));
                            int64_t held = 0;
                            for (int64_t c = 0; c < count; ++c) {
                              if (!Holds(output, first + c)) continue;
                              encoder.EncodeColumn(first + c, codes + c * stride,
                                                   rows.data() + held++ * encoder.row_bytes());
                            }
                            // Runs of columns begin at even ones.
                            const int64_t row = output.rows == Rows::kAll ? first : first / 2;
                            return WriteRows(output, at, row, held, encoder.row_bytes(),
                                             reinterpret_cast<const std::byte*>(rows.data()));
                          });
  }

  Status WriteFloats(const GgufOutput& output, int64_t at, const QuantizedWeights& matrix) {
    const WeightsSpec& spec = matrix.spec;
    const int64_t element = output.type.bytes;
    MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer rows,
                            AlignedBuffer::Allocate(spec.n * spec.k * element));
    TransposeElements(matrix.codes.As<std::byte>(), 1, spec.k, spec.n, element, rows.data());
    return WriteHeld(output, at, spec.n, spec.k * element, rows.As<std::byte>());
  }

  Io& io_;
  const Checkpoint& checkpoint_;
  const Checkpoint::Impl& source_;
  const ContainerOutput& output_;
  GgufModelFacts facts_;
  GgufMetadataBuilder metadata_;
  std::vector<GgufOutput> outputs_;
  std::set<std::string> names_;
  std::vector<SkippedTensor> files_;
  std::vector<GgufShard> shards_;
  FileHandle file_;  ///< The shard that is written, and where its data begin.
  int64_t data_begin_ = 0;
  int64_t total_ = 0;
  int64_t done_ = 0;
};

}  // namespace

WriteContainer WriteGguf;
CheckContainer CheckGguf;

Status CheckGguf(const Checkpoint& source, std::span<const ModuleRecord> records) {
  SystemIo io;
  const ContainerOutput none;
  return GgufExport(io, source, none).Check(records);
}

Result<std::vector<SkippedTensor>> WriteGguf(Io& io, const Checkpoint& checkpoint,
                                             const ContainerOutput& output) {
  GgufExport exporting(io, checkpoint, output);
  MARLIN_RETURN_IF_ERROR(exporting.Plan());
  const Checkpoint::Impl& source = CheckpointAccess::Get(checkpoint);
  OutputDirectory::Options options;
  options.overwrite = output.overwrite;
  if (output.shard_bytes == 0) options.file = kSingleFile;
  MARLIN_ASSIGN_OR_RETURN(options.source, SourceFiles(io, source));
  MARLIN_ASSIGN_OR_RETURN(
      OutputDirectory directory,
      OutputDirectory::Begin(io, output.path,
                             Fingerprint(source, fmt::format("gguf {}", output.shard_bytes)),
                             options));
  MARLIN_RETURN_IF_ERROR(exporting.Write(&directory));
  MARLIN_RETURN_IF_ERROR(directory.Commit());
  return exporting.TakeFiles();
}

}  // namespace marlin
