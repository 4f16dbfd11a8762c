#include "bench/load.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "base/macros.h"
#include "base/text_table.h"
#include "bench/document.h"
#include "marlin/checkpoint.h"

namespace marlin::bench {

Result<LoadBench> BenchLoad(const std::string& path, const Device& device,
                            const ModelOptions& options, const TimingOptions& timing) {
  LoadBench bench;
  bench.path = path;
  {
    MARLIN_ASSIGN_OR_RETURN(const Model model, Model::Open(path, device, options));
    bench.device = model.device().info();
    bench.model = model.info();
    MARLIN_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(path));
    for (const TensorInfo& tensor : checkpoint.tensors()) bench.file_bytes += tensor.bytes;
  }
  Status failed;
  const auto open = [&](int64_t) {
    const Result<Model> model = Model::Open(path, device, options);
    if (!model.ok()) failed = model.status();
  };
  bench.timing = Measure(open, timing);
  MARLIN_RETURN_IF_ERROR(failed);
  return bench;
}

nlohmann::ordered_json LoadBench::ToJson() const {
  nlohmann::ordered_json row = {{"op", "load"},
                                {"path", path},
                                {"model_type", model.model_type},
                                {"recipe", model.recipe},
                                {"parameters", model.parameters},
                                {"file_bytes", file_bytes},
                                {"bytes", model.bytes}};
  row.update(TimingJson(timing));
  row["gbps"] = BytesPerSecond() * 1e-9;
  return row;
}

std::string LoadBench::ToText() const {
  Table table({"s", "10 to 90 %", "GB/s"});
  table.AddRow({fmt::format("{:.3f}", timing.median),
                fmt::format("{:.3f} to {:.3f}", timing.p10, timing.p90),
                fmt::format("{:.2f}", BytesPerSecond() * 1e-9)});
  return fmt::format("{}: {} ({}), {} parameters, {} in files, {} prepared\n\n{}", path,
                     model.model_type, model.recipe.empty() ? "plain" : model.recipe,
                     FormatCount(model.parameters), FormatBytes(file_bytes),
                     FormatBytes(model.bytes), table.ToString());
}

}  // namespace marlin::bench
