// The functions that kernels call, each for the simulation that runs on this thread.
#include "metal_sim/launch.h"
#include "metal_sim/simulation.h"

namespace metal_sim {
namespace {

MemoryAccess AccessOf(const void* address, size_t bytes, const void* site) {
  MemoryAccess access;
  access.address = reinterpret_cast<uintptr_t>(address);
  access.bytes = bytes;
  access.site = site;
  return access;
}

void* Buffer(int index) {
  const Simulation* current = Simulation::Current();
  return current == nullptr ? nullptr : current->Buffer(index);
}

void* ThreadgroupArgument(int index) {
  const Simulation* current = Simulation::Current();
  return current == nullptr ? nullptr : current->ThreadgroupArgument(index);
}

void* ThreadgroupVariableOf(int id, size_t bytes, size_t alignment, const char* name) {
  Simulation* current = Simulation::Current();
  return current == nullptr ? nullptr : current->ThreadgroupVariable(id, bytes, alignment, name);
}

Triple Position(Source source) {
  const Simulation* current = Simulation::Current();
  return current == nullptr ? Triple{} : current->Position(source);
}

uint32_t Lane() {
  const Simulation* current = Simulation::Current();
  return current == nullptr ? 0 : current->Lane();
}

void ThreadgroupBarrier(uint32_t flags, const void* site) {
  if (Simulation* current = Simulation::Current()) {
    current->WaitAtBarrier(ThreadState::kAtThreadgroupBarrier, flags, site);
  }
}

void SimdgroupBarrier(uint32_t flags, const void* site) {
  if (Simulation* current = Simulation::Current()) {
    current->WaitAtBarrier(ThreadState::kAtSimdgroupBarrier, flags, site);
  }
}

void RunCollective(void* data, Collective function, void* context, const char* name, bool whole,
                   const void* site) {
  Simulation* current = Simulation::Current();
  Waiting* waiting = current == nullptr ? nullptr : current->BeginToWait();
  if (waiting == nullptr) return;
  waiting->site = site;
  waiting->data = data;
  waiting->function = function;
  waiting->context = context;
  waiting->name = name;
  waiting->whole = whole;
  current->Wait(ThreadState::kInCollective);
}

void Access(const void* address, size_t bytes, bool write, const void* site) {
  Simulation* current = Simulation::Current();
  if (current == nullptr) return;
  MemoryAccess access = AccessOf(address, bytes, site);
  access.reads = !write;
  access.writes = write;
  current->Access(access);
}

void Atomic(const void* address, size_t bytes, bool read, bool write, int order, const void* site) {
  Simulation* current = Simulation::Current();
  if (current == nullptr) return;
  MemoryAccess access = AccessOf(address, bytes, site);
  access.reads = read;
  access.writes = write;
  access.atomic = true;
  current->Atomic(access, order);
}

void Fence(uint32_t flags, int order, int scope, const void* site) {
  if (Simulation* current = Simulation::Current()) current->Fence(flags, order, scope, site);
}

void CountMatrixOperation(uint64_t multiply_adds) {
  if (Simulation* current = Simulation::Current()) current->CountMatrixOperation(multiply_adds);
}

void Fault(const char* what, const void* site) {
  if (Simulation* current = Simulation::Current()) current->Fault(what, site);
}

void Undefined(const char* what) {
  if (Simulation* current = Simulation::Current()) current->ReportUndefined(what);
}

}  // namespace

const Runtime* SimulatorRuntime() {
  static constexpr Runtime kRuntime = {
      .buffer = Buffer,
      .threadgroup_memory = ThreadgroupArgument,
      .threadgroup_variable = ThreadgroupVariableOf,
      .position = Position,
      .lane = Lane,
      .threadgroup_barrier = ThreadgroupBarrier,
      .simdgroup_barrier = SimdgroupBarrier,
      .collective = RunCollective,
      .access = Access,
      .atomic = Atomic,
      .fence = Fence,
      .count_matrix_operation = CountMatrixOperation,
      .fault = Fault,
      .undefined = Undefined,
  };
  return &kRuntime;
}

Result<Report> Simulate(const Kernel& kernel, const Launch& launch,
                        const SimulationOptions& options) {
  Simulation simulation(kernel, launch, options);
  const Status prepared = simulation.Prepare();
  if (!prepared.ok()) return prepared;
  simulation.Run();
  return simulation.Finish();
}

}  // namespace metal_sim
