// ONNX models: initializers, in the file or next to it, and the nodes that say how those are
// quantized (onnx_weights.h).
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/files/model_directory.h"
#include "checkpoint/files/safetensors.h"
#include "checkpoint/listed_reader.h"
#include "checkpoint/readers/onnx/onnx_uses.h"
#include "checkpoint/readers/onnx/onnx_weights.h"
#include "checkpoint/source_layout.h"

namespace marlin {
namespace {

using Source = OnnxSource;

/// Nodes whose weights are quantized in a way that is not read.
bool IsForeignOp(const OnnxNode& node) {
  constexpr std::string_view kOps[] = {"MatMulBnb4",
                                       "GatherBlockQuantized",
                                       "MatMulBlockQuantizedFp4Weight",
                                       "MatMulBlockQuantizedFp8Weight",
                                       "MatMulInteger",
                                       "MatMulIntegerToFloat",
                                       "DynamicQuantizeMatMul",
                                       "ConvInteger"};
  return node.op.starts_with("QLinear") ||
         std::find(std::begin(kOps), std::end(kOps), node.op) != std::end(kOps);
}

/// The nodes whose weights are read.
struct NodeKind {
  std::string_view op;
  ReadOnnxNode* read;
};
constexpr NodeKind kNodeKinds[] = {
    {"MatMulNBits", ReadOnnxNBits},
    {"DequantizeLinear", ReadOnnxDequantize},
    {"QMoE", ReadOnnxExperts},
};

}  // namespace

OpenReader OpenPlain;

namespace {

class OnnxReader {
 public:
  explicit OnnxReader(TensorStore& store)
      : store_(store), reader_(std::make_unique<ListedReader>(store)) {}

  Result<std::unique_ptr<const ModuleReader>> Open() {
    MARLIN_ASSIGN_OR_RETURN(file_, ParseOnnx(store_.files.front().mapping->text(), Where()));
    sources_ = std::make_shared<std::vector<Source>>();
    sources_->reserve(file_.tensors.size());
    for (const OnnxTensor& tensor : file_.tensors) MARLIN_RETURN_IF_ERROR(AddSource(tensor));
    uses_ = OnnxUses(file_.nodes);
    for (const OnnxNode& node : file_.nodes) MARLIN_RETURN_IF_ERROR(ReadNode(node));
    MARLIN_RETURN_IF_ERROR(Store());
    if (modules_.empty()) return OpenPlain(store_, QuantMethod());
    for (const auto& add : modules_) add();
    MARLIN_RETURN_IF_ERROR(reader_->Finish());
    return std::unique_ptr<const ModuleReader>(std::move(reader_));
  }

 private:
  std::string Where() const {
    return store_.is_directory ? JoinPath(store_.path, store_.files.front().name) : store_.path;
  }
  Status Fail(const std::string& message, Code code = Code::kMalformedFile) const {
    return Status(code, fmt::format("{}: {}", Printable(Where()), message));
  }
  Status FailTensor(std::string_view name, const std::string& message,
                    Code code = Code::kMalformedFile) const {
    return Fail(fmt::format("tensor \"{}\": {}", Printable(name), message), code);
  }
  Status FailNode(const OnnxNode& node, const std::string& message,
                  Code code = Code::kMalformedFile) const {
    return Fail(fmt::format("{} \"{}\": {}", Printable(node.op), Printable(node.name), message),
                code);
  }

  Status AddSource(const OnnxTensor& tensor) {
    if (EscapeUnprintable(tensor.name) != tensor.name ||
        tensor.name.find('*') != std::string_view::npos) {
      return FailTensor(tensor.name, "its name is not printable UTF-8 without '*'");
    }
    if (!by_name_.emplace(tensor.name, sources_->size()).second) {
      return FailTensor(tensor.name, "occurs twice");
    }
    Source source;
    source.tensor = tensor;
    const Mapping& mapping = *store_.files.front().mapping;
    if (tensor.external) {
      MARLIN_RETURN_IF_ERROR(FindExternal(tensor, &source));
    } else if (!tensor.numbers.empty() || tensor.bytes == 0) {
      MARLIN_ASSIGN_OR_RETURN(source.decoded, DecodeOnnxNumbers(tensor, Where()));
      decoded_bytes_ += tensor.bytes;
      if (decoded_bytes_ > kMostDecodedBytes) {
        return Fail(fmt::format("more than {} bytes outside raw_data", kMostDecodedBytes),
                    Code::kUnsupported);
      }
      source.offset = tensor.numbers.empty() ? 0 : tensor.numbers.data() - mapping.text().data();
    } else {
      source.offset = tensor.data.data() - mapping.text().data();
      source.data = mapping.data() + source.offset;
    }
    sources_->push_back(std::move(source));
    if (sources_->back().data == nullptr) sources_->back().data = sources_->back().decoded.data();
    return {};
  }

  /// Data in another file of the same directory.
  Status FindExternal(const OnnxTensor& tensor, Source* source) {
    std::string name(tensor.location);
    if (name.starts_with("./")) name.erase(0, 2);
    const bool plain = !name.empty() && name != "." && name != ".." &&
                       name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
    if (!plain) {
      return FailTensor(tensor.name,
                        fmt::format("its data are in \"{}\", which is not the name of a file in "
                                    "the model's directory",
                                    Printable(name)));
    }
    const auto [found, inserted] = external_.emplace(name, store_.files.size());
    if (inserted) MARLIN_RETURN_IF_ERROR(MapExternal(name));
    const Mapping& mapping = *store_.files[found->second].mapping;
    const std::optional<int64_t> end = (Checked(tensor.offset) + Checked(tensor.bytes)).Take();
    if (!end || *end > mapping.size()) {
      return FailTensor(tensor.name,
                        fmt::format("{} bytes at {} pass the end of \"{}\" at {}", tensor.bytes,
                                    tensor.offset, Printable(name), mapping.size()));
    }
    source->file = found->second;
    source->offset = tensor.offset;
    source->data = mapping.data() + tensor.offset;
    return {};
  }

  Status MapExternal(const std::string& name) {
    const size_t slash = store_.path.rfind('/');
    const std::string directory =
        store_.is_directory ? store_.path : store_.path.substr(0, slash + 1);  // npos + 1 is 0.
    const std::string path = store_.is_directory ? JoinPath(directory, name) : directory + name;
    MARLIN_RETURN_IF_ERROR(CheckModelFile(*store_.io, directory.empty() ? "." : directory, name));
    MARLIN_ASSIGN_OR_RETURN(const FileInfo info, store_.io->Stat(path));
    if (info.kind == FileKind::kMissing) {
      return Status(Code::kIo, Printable(path) + ": no such file");
    }
    MARLIN_ASSIGN_OR_RETURN(std::shared_ptr<const Mapping> mapping, store_.io->Map(path));
    store_.files.push_back({name, info, std::move(mapping), 0});
    return {};
  }

  const Source* Find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return name.empty() || found == by_name_.end() ? nullptr : &(*sources_)[found->second];
  }

  Status ReadNode(const OnnxNode& node) {
    for (const NodeKind& kind : kNodeKinds) {
      if (node.op == kind.op) return ReadWeights(node, kind);
    }
    if (!IsForeignOp(node)) return {};
    for (const std::string_view input : node.inputs) {
      if (Find(input) != nullptr) {
        return FailNode(node, "its weights are quantized in a way that is not supported",
                        Code::kUnsupported);
      }
    }
    return {};
  }

  Status ReadWeights(const OnnxNode& node, const NodeKind& kind) {
    const auto find = [this](std::string_view name) { return Find(name); };
    Result<std::vector<OnnxWeights>> read = kind.read(node, find, uses_);
    if (!read.ok()) {
      return FailNode(node, std::string(read.status().message()), read.status().code());
    }
    for (OnnxWeights& weights : *read) {
      (*sources_)[by_name_.at(weights.codes->tensor.name)].scales = weights.scales;
      if (weights.index != nullptr) hidden_.insert(weights.index);
      if (weights.fill) {
        AddModule(std::move(weights));
        continue;
      }
      for (const Source* part : {weights.codes, weights.scales, weights.zeros}) {
        if (part != nullptr) hidden_.insert(part);
      }
      values_.push_back({NameOf(*weights.codes), weights.codes, std::move(weights.values)});
    }
    return {};
  }

  /// Whether a plain initializer holds matrices the other way round than a checkpoint of its type
  /// of model does: [in, out] where products read it so, while linear layers are [out, in].
  bool IsTransposed(const OnnxTensor& tensor) const {
    const int rank = tensor.shape.rank();
    if ((rank != 2 && rank != 3) || tensor.bytes == 0) return false;
    const std::optional<SourceLayout> used = uses_.LayoutOf(tensor.name);
    return used && *used != TypeLayoutOf(store_.config(), tensor.name);
  }

  /// The name of a weight: its codes' name without what quantizers append.
  std::string NameOf(const Source& codes) {
    std::string_view name = codes.tensor.name;
    for (const std::string_view suffix :
         {"_quantized", "_quant", "_DQ_Q2", "_DQ_Q4", "_DQ_Q8", "_Q2", "_Q4", "_Q8", ".qweight"}) {
      if (name.ends_with(suffix) && name.size() > suffix.size()) {
        name.remove_suffix(suffix.size());
        break;
      }
    }
    std::string plain(name);
    // A name of an initializer stays unique.
    return taken_.insert(plain).second && Find(plain) == nullptr ? plain
                                                                 : std::string(codes.tensor.name);
  }

  void AddModule(OnnxWeights weights) {
    ModuleRecord record = RecordOf(NameOf(*weights.codes), weights.spec);
    record.stacked = record.stacked || weights.stacked;
    record.exactness = weights.exactness;
    // A plain checkpoint has the matrix as its type of model says, whatever the graph does with it.
    record.layout = TypeLayoutOf(store_.config(), record.module.name);
    // Scales and zeros that several modules share are parts of the first.
    std::vector<std::pair<ModulePart, const Source*>> own = {{ModulePart::kCodes, weights.codes}};
    used_.insert(weights.codes);
    for (const auto& [part, source] : {std::pair(ModulePart::kScales, weights.scales),
                                       std::pair(ModulePart::kZeros, weights.zeros)}) {
      if (source != nullptr && used_.insert(source).second) own.emplace_back(part, source);
    }
    // Tensors have numbers once the store is sorted.
    modules_.push_back([this, record = std::move(record), own, fill = std::move(weights.fill)] {
      std::vector<PartTensor> tensors;
      tensors.reserve(own.size());
      for (const auto& [part, source] : own) {
        tensors.push_back({part, *store_.FindTensor(source->tensor.name)});
      }
      reader_->Add(record, std::move(tensors),
                   [fill, keep = sources_](WeightsBuffer* buffer, ThreadPool& pool) {
                     return fill(buffer, pool);
                   });
    });
  }

  Status Store() {
    std::map<std::string, std::function<void(std::byte*)>> computed;
    for (const Source& source : *sources_) {
      if (hidden_.contains(&source) && !used_.contains(&source)) continue;
      const OnnxTensor& tensor = source.tensor;
      const std::optional<DType> dtype = OnnxDType(tensor.type);
      if (!dtype && !used_.contains(&source)) {
        return FailTensor(tensor.name,
                          fmt::format("{} elements that no node dequantizes are not supported",
                                      OnnxTypeName(tensor.type)),
                          Code::kUnsupported);
      }
      const std::string name(tensor.name);
      const bool transposed = !used_.contains(&source) && IsTransposed(tensor);
      Shape shape = dtype ? tensor.shape : Shape{tensor.bytes};
      if (transposed) std::swap(shape[shape.rank() - 2], shape[shape.rank() - 1]);
      store_.tensors.push_back({name, dtype.value_or(DType::kU8), shape,
                                store_.files[source.file].name, source.offset, tensor.bytes});
      if (transposed) {
        computed[name] = [from = &source, keep = sources_](std::byte* out) {
          from->WriteTransposed(out);
        };
      } else if (!source.decoded.empty()) {
        computed[name] = [from = &source, keep = sources_](std::byte* out) {
          std::memcpy(out, from->decoded.data(), from->decoded.size());
        };
      }
    }
    for (const Values& values : values_) {
      const Source& codes = *values.codes;
      store_.tensors.push_back({values.name, DType::kF32, codes.tensor.shape,
                                store_.files[codes.file].name, codes.offset, 4 * codes.count()});
      if (codes.count() == 0) continue;
      computed[values.name] = [compute = values.compute, keep = sources_](std::byte* out) {
        compute(out);
      };
    }
    if (store_.tensors.empty()) return Fail("holds no initializers");
    if (static_cast<int64_t>(store_.tensors.size()) > kMaxTensorCount) {
      return Fail(fmt::format("more than {} tensors", kMaxTensorCount));
    }
    MARLIN_RETURN_IF_ERROR(SortTensors(&store_));
    for (auto& [name, compute] : computed) {
      store_.computed.emplace(*store_.FindTensor(name), std::move(compute));
    }
    return {};
  }

  static constexpr int64_t kMostDecodedBytes = int64_t{64} << 20;

  struct Values {
    std::string name;
    const Source* codes = nullptr;
    std::function<void(std::byte*)> compute;
  };

  TensorStore& store_;
  std::unique_ptr<ListedReader> reader_;
  OnnxFile file_;
  /// Shared with the functions that load modules. It does not grow once nodes are read.
  std::shared_ptr<std::vector<Source>> sources_;
  std::unordered_map<std::string_view, size_t> by_name_;
  std::map<std::string, size_t> external_;  ///< Numbers of files by name.
  OnnxUses uses_;
  std::set<const Source*> used_;    ///< Parts of modules.
  std::set<const Source*> hidden_;  ///< Parts of tensors that are computed.
  std::set<std::string> taken_;     ///< Names of modules.
  std::vector<std::function<void()>> modules_;
  std::vector<Values> values_;
  int64_t decoded_bytes_ = 0;
};

}  // namespace

OpenReader OpenOnnx;

Result<std::unique_ptr<const ModuleReader>> OpenOnnx(TensorStore& store,
                                                     const QuantMethod& /*method*/) {
  return OnnxReader(store).Open();
}

}  // namespace marlin
