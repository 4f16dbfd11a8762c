#include "bench/load.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "base/macros.h"
#include "base/text_table.h"
#include "bench/document.h"
#include "engine/placement/place_model.h"
#include "marlin/checkpoint.h"
#include "model/layers.h"
#include "model/open_model.h"
#include "model/placement.h"

namespace marlin::bench {

namespace {

/// Loads the decoder of a model, and times the parts.
Result<std::vector<LoadStage>> TimeStages(const std::string& path, const Device& device,
                                          const ModelOptions& options) {
  const Stopwatch total;
  MARLIN_ASSIGN_OR_RETURN(ModelDirectory directory,
                          OpenModelDirectory(path, {options.allow_extra_tensors}));
  LoadSeconds seconds;
  LoadOptions load;
  load.seconds = &seconds;
  MARLIN_ASSIGN_OR_RETURN(const ModelPlacement placement, PlaceModel(directory, device, options));
  load.host_experts = placement.host_experts();
  load.host_layers = placement.host_layers();
  if (!options.prepared.empty()) {
    MARLIN_ASSIGN_OR_RETURN(load.prepared,
                            OpenPrepared(options.prepared, directory.checkpoint, device));
  }
  const double opened = total.Seconds();
  MARLIN_ASSIGN_OR_RETURN(Decoder decoder, LoadDecoder(directory.checkpoint,
                                                       std::move(directory.config), device, load));
  const double loaded = total.Seconds() - opened;
  MARLIN_RETURN_IF_ERROR(UploadTables(device, &decoder));
  if (decoder.host_part != nullptr) {
    MARLIN_RETURN_IF_ERROR(UploadTables(*placement.layers.host, decoder.host_part.get()));
  }
  const double known = seconds.read + seconds.prepare + seconds.wait;
  return std::vector<LoadStage>{{"open", opened},
                                {"read", seconds.read},
                                {"prepare", seconds.prepare},
                                {"wait", seconds.wait},
                                {"vectors", loaded - known},
                                {"tables", total.Seconds() - opened - loaded}};
}

}  // namespace

Result<LoadBench> BenchLoad(const std::string& path, const Device& device,
                            const ModelOptions& options, const TimingOptions& timing) {
  LoadBench bench;
  bench.path = path;
  Device opened = device;
  {
    MARLIN_ASSIGN_OR_RETURN(const Model model, Model::Open(path, device, options));
    opened = model.device();
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
  MARLIN_ASSIGN_OR_RETURN(bench.stages, TimeStages(path, opened, options));
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
  for (const LoadStage& stage : stages) row["stages"][stage.name] = stage.seconds;
  return row;
}

std::string LoadBench::ToText() const {
  Table table({"", "s", "10 to 90 %", "GB/s"});
  const auto add = [&](const std::string& name, double seconds, const std::string& spread) {
    table.AddRow({name, fmt::format("{:.3f}", seconds), spread,
                  seconds > 0
                      ? fmt::format("{:.2f}", static_cast<double>(file_bytes) / seconds * 1e-9)
                      : ""});
  };
  add("load", timing.median, fmt::format("{:.3f} to {:.3f}", timing.p10, timing.p90));
  for (const LoadStage& stage : stages) add("  " + stage.name, stage.seconds, "");
  return fmt::format("{}: {} ({}), {} parameters, {} in files, {} prepared\n\n{}", path,
                     model.model_type, model.recipe.empty() ? "plain" : model.recipe,
                     FormatCount(model.parameters), FormatBytes(file_bytes),
                     FormatBytes(model.bytes), table.ToString());
}

}  // namespace marlin::bench
