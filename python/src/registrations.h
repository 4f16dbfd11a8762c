// The parts of the extension, which module.cc puts into it.
#pragma once

#include <nanobind/nanobind.h>

namespace marlin::python {

void BindWeights(nanobind::module_& module);
void BindProducts(nanobind::module_& module);
void BindExperts(nanobind::module_& module);
void BindExpertCalls(nanobind::module_& module);
void BindMetal(nanobind::module_& module);
void BindMetalExperts(nanobind::module_& module);
void BindCheckpoints(nanobind::module_& module);
void BindModels(nanobind::module_& module);
void BindScheduler(nanobind::module_& module);
void BindDecoder(nanobind::module_& module);
void BindCommand(nanobind::module_& module);
void BindNames(nanobind::module_& module);
void BindNamedCalls(nanobind::module_& module);

}  // namespace marlin::python
