#include "text/product_names.h"

#include "base/find_named.h"
#include "base/macros.h"

namespace marlin {
namespace {

constexpr Activation kActivations[] = {Activation::kNone, Activation::kSilu, Activation::kGeluTanh,
                                       Activation::kRelu};

struct AccuracyEntry {
  Accuracy accuracy;
  std::string_view name;
};
constexpr AccuracyEntry kAccuracies[] = {
    {Accuracy::kDefault, "default"}, {Accuracy::kExact, "exact"}, {Accuracy::kW4A8, "w4a8"}};

}  // namespace

std::span<const Activation> AllActivations() { return kActivations; }

std::string_view ActivationName(Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return "none";
    case Activation::kSilu:
      return "silu";
    case Activation::kGeluTanh:
      return "gelu_tanh";
    case Activation::kRelu:
      return "relu";
  }
  return "unknown";
}

Result<Activation> ParseActivation(std::string_view name) {
  return FindNamed("activation", "name", name, kActivations, ActivationName);
}

Result<Accuracy> ParseAccuracy(std::string_view name) {
  MARLIN_ASSIGN_OR_RETURN(const AccuracyEntry found,
                          FindNamed("accuracy", "name", name, kAccuracies,
                                    [](const AccuracyEntry& entry) { return entry.name; }));
  return found.accuracy;
}

}  // namespace marlin
