#include "cli/checkpoint_listing.h"

#include <algorithm>

namespace marlin::cli {
namespace {

ListedTensor ListModule(const QuantizedModule& module) {
  const WeightsSpec& spec = module.spec;
  ListedTensor listed;
  listed.name = module.name;
  listed.format = FormatName(spec.format);
  if (spec.experts != 1) listed.shape.Append(spec.experts);
  listed.shape.Append(spec.k);
  listed.shape.Append(spec.n);
  listed.group_size = spec.group_size;
  listed.parameters = spec.experts * spec.k * spec.n;
  listed.bytes = StoredBytes(spec);
  listed.layer_class = module.layer_class;
  return listed;
}

ListedTensor ListPlain(const TensorInfo& tensor) {
  ListedTensor listed;
  listed.name = tensor.name;
  listed.format = DTypeName(tensor.dtype);
  listed.shape = tensor.shape;
  listed.parameters = tensor.shape.ElementCount();
  listed.bytes = tensor.bytes;
  listed.layer_class = ClassifyTensor(tensor.name);
  return listed;
}

}  // namespace

double ListedTensor::BitsPerWeight() const {
  return parameters == 0 ? 0.0 : 8.0 * static_cast<double>(bytes) / static_cast<double>(parameters);
}

std::vector<ListedTensor> ListTensors(const Checkpoint& checkpoint) {
  std::vector<ListedTensor> tensors;
  for (const QuantizedModule& module : checkpoint.modules()) tensors.push_back(ListModule(module));
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    if (!checkpoint.IsModulePart(tensor.name)) tensors.push_back(ListPlain(tensor));
  }
  return tensors;
}

bool HasExperts(const Checkpoint& checkpoint) {
  return std::any_of(checkpoint.tensors().begin(), checkpoint.tensors().end(),
                     [](const TensorInfo& tensor) {
                       return ClassifyTensor(tensor.name) == LayerClass::kMoeExpert;
                     });
}

}  // namespace marlin::cli
