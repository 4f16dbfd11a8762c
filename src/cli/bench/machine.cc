#include "cli/bench/machine.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "backends/metal/metal_backend.h"
#include "base/macros.h"
#include "bench/document.h"
#include "bench/gpu_report.h"
#include "ops/device/device.h"
#include "plan/gemm/backend.h"

namespace marlin::cli {

Result<std::unique_ptr<Machine>> Machine::Measure(BenchDevice& opened, const Device& measured) {
  std::unique_ptr<Machine> machine(new Machine(measured));
  const Backend& backend = Internals::Impl(machine->device_).backend();
  if (machine->info_.backend == "cuda") {
    MARLIN_RETURN_IF_ERROR(machine->MeasureCuda(opened.name()));
  } else if (machine->info_.backend == "metal") {
    std::optional<metal::GpuRoofline>& roofline = machine->metal_roofline_;
    MARLIN_ASSIGN_OR_RETURN(roofline, metal::GpuRoofline::Make(metal::DriverOf(backend)));
    MARLIN_ASSIGN_OR_RETURN(machine->ceilings_, bench::MeasureCeilings(*roofline));
    machine->probe_ = bench::ProbeOf(*roofline);
  } else {
    std::optional<cpu::Roofline>& roofline = machine->cpu_roofline_;
    MARLIN_ASSIGN_OR_RETURN(roofline,
                            cpu::Roofline::Make(backend.Properties().level, opened.pool()));
    machine->ceilings_ = bench::MeasureCeilings(*roofline);
    machine->probe_ = bench::ProbeOf(*roofline);
  }
  return machine;
}

Status Machine::MeasureCuda(const std::string& name) {
  MARLIN_ASSIGN_OR_RETURN(timer_, cuda::OpenGraphTimer(name));
  // Loaded even without --against: its largest GEMM is the compute ceiling.
  Result<bench::CublasBaseline> cublas = bench::LoadCublas(device_);
  cublas_status_ = cublas.status();
  if (cublas.ok()) cublas_ = *std::move(cublas);
  gpu_ =
      std::make_unique<bench::GpuBench>(device_, *timer_, cublas_ ? &cublas_->baseline : nullptr);
  MARLIN_ASSIGN_OR_RETURN(gpu_ceilings_, gpu_->MeasureCeilings());
  ceilings_ = bench::CeilingsOf(gpu_ceilings_, cublas_version());
  return {};
}

nlohmann::ordered_json Machine::Document(const std::string& commit) const {
  nlohmann::ordered_json document = bench::DocumentHead(info_, commit);
  for (const auto& [name, value] : ceilings_.figures) document["roofline"][name] = value;
  document["results"] = nlohmann::ordered_json::array();
  return document;
}

std::string Machine::Heading() const {
  const std::string threads =
      info_.backend == "cpu" ? fmt::format(", {} threads", info_.threads) : "";
  return fmt::format("{}{}\n{}\n\n", info_.model, threads, ceilings_.text);
}

}  // namespace marlin::cli
