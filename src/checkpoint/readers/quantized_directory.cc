// Quantized directories as this project writes them: docs/formats/checkpoint.md.
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/macros.h"
#include "checkpoint/codes/tiled_codes.h"
#include "checkpoint/decoder_names.h"
#include "checkpoint/module_reader.h"
#include "checkpoint/module_tensors.h"
#include "layout/weights_buffer.h"

namespace marlin {
namespace {

constexpr int64_t kViewAlignment = 4;  // QuantizedWeights promises it of its views.

// A codebook equal to the built-in one is left out, so that kernels need not compare tables.
std::vector<float> ReadCodebook(Format format, const std::byte* data) {
  const std::span<const float> built_in = FormatValues(format);
  std::vector<float> codebook(built_in.size());
  std::memcpy(codebook.data(), data, codebook.size() * sizeof(float));
  const bool same =
      std::memcmp(codebook.data(), built_in.data(), codebook.size() * sizeof(float)) == 0;
  return same ? std::vector<float>() : codebook;
}

/// Sets a view, which counts experts even if the module has one.
void AttachPart(const ModuleRecord& record, const ModuleTensor& part, const std::byte* data,
                QuantizedWeights* weights) {
  const WeightsSpec& spec = weights->spec;
  if (part.part == ModulePart::kCodebook) {
    weights->codebook = ReadCodebook(spec.format, data);
    return;
  }
  Shape shape;
  if (part.part == ModulePart::kCodes) {  // Tiled ones have been brought into the canonical layout.
    shape = {spec.experts, WordsAlongK(spec), spec.n};
  } else {
    if (!record.stacked && part.part != ModulePart::kGlobalScale) shape.Append(1);
    for (int i = 0; i < part.shape.rank(); ++i) shape.Append(part.shape[i]);
  }
  *PartView(weights, part.part) = TensorView(data, part.dtype, shape);
}

class QuantizedDirectoryReader final : public ModuleReader {
 public:
  explicit QuantizedDirectoryReader(const TensorStore& store) : store_(store) {}

  Status Open(const QuantMethod& method) {
    const std::string config = JoinPath(store_.path, "config.json");
    MARLIN_ASSIGN_OR_RETURN(QuantizationConfig parsed,
                            ParseQuantizationConfig(*method.config, config));
    modules_ = std::move(parsed.modules);
    if (store_.full_names || !store_.text_prefixes.empty()) {
      for (ModuleRecord& record : modules_) Rename(&record.module);
      std::sort(modules_.begin(), modules_.end(), [](const ModuleRecord& a, const ModuleRecord& b) {
        return a.module.name < b.module.name;
      });
    }
    recipe_name_ = std::move(parsed.recipe_name);
    return CheckModules();
  }

  std::vector<PartTensor> Parts(const ModuleRecord& record) const override {
    std::vector<PartTensor> parts;
    for (const ModuleTensor& part : ModuleTensors(record)) {
      parts.push_back({part.part, *store_.FindTensor(part.name)});  // CheckModules found all.
    }
    return parts;
  }

  Result<QuantizedWeights> Load(const ModuleRecord& record) const override {
    auto copies = std::make_shared<std::vector<AlignedBuffer>>();
    QuantizedWeights weights;
    weights.spec = record.module.spec;
    for (const ModuleTensor& part : ModuleTensors(record)) {
      const size_t tensor = *store_.FindTensor(part.name);
      const std::byte* data = store_.Data(tensor);
      if (part.part == ModulePart::kCodes && record.codes == PackedLayout::kMarlinW4) {
        MARLIN_ASSIGN_OR_RETURN(AlignedBuffer packed, UntileCodes(weights.spec, data));
        copies->push_back(std::move(packed));
        data = copies->back().data();
      } else if (reinterpret_cast<uintptr_t>(data) % kViewAlignment != 0) {
        const int64_t bytes = store_.tensors[tensor].bytes;
        MARLIN_ASSIGN_OR_RETURN(AlignedBuffer copy, AlignedBuffer::Allocate(bytes));
        if (bytes > 0) std::memcpy(copy.data(), data, static_cast<size_t>(bytes));
        copies->push_back(std::move(copy));
        data = copies->back().data();
      }
      AttachPart(record, part, data, &weights);
    }
    weights.owner = std::move(copies);
    return weights;
  }

 private:
  void Rename(QuantizedModule* module) const {
    module->name = DecoderName(store_, module->name);
    module->layer_class = ClassifyTensor(module->name);
  }

  // Every tensor of every module exists with its type and shape, and belongs to that module only.
  Status CheckModules() const {
    std::unordered_map<std::string, std::string_view> owners;
    for (const ModuleRecord& record : modules_) {
      const auto malformed = [&](const std::string& message) {
        return Status(Code::kMalformedFile,
                      fmt::format("{}: module \"{}\": {}", Printable(store_.path),
                                  Printable(record.module.name), message));
      };
      for (const ModuleTensor& expected : ModuleTensors(record)) {
        const std::string name = Printable(expected.name);
        const std::optional<size_t> found = store_.FindTensor(expected.name);
        if (!found) return malformed(fmt::format("no tensor \"{}\"", name));
        const TensorInfo& tensor = store_.tensors[*found];
        if (tensor.dtype != expected.dtype || !(tensor.shape == expected.shape)) {
          return malformed(fmt::format("tensor \"{}\": expected {} {}, got {} {}", name,
                                       DTypeName(expected.dtype), expected.shape.ToString(),
                                       DTypeName(tensor.dtype), tensor.shape.ToString()));
        }
        const auto [owner, inserted] = owners.emplace(expected.name, record.module.name);
        if (!inserted) {
          return malformed(fmt::format("tensor \"{}\" belongs to module \"{}\" too", name,
                                       Printable(owner->second)));
        }
      }
      const Status possible = CheckSpec(record.module.spec);
      if (!possible.ok()) return malformed(possible.message());
    }
    return {};
  }

  const TensorStore& store_;
};

}  // namespace

OpenReader OpenQuantizedDirectory;

Result<std::unique_ptr<const ModuleReader>> OpenQuantizedDirectory(TensorStore& store,
                                                                   const QuantMethod& method) {
  auto reader = std::make_unique<QuantizedDirectoryReader>(store);
  MARLIN_RETURN_IF_ERROR(reader->Open(method));
  return std::unique_ptr<const ModuleReader>(std::move(reader));
}

}  // namespace marlin
