// The module _core: errors as exceptions, and the parts of registrations.h.
#include "core.h"
#include "marlin/version.h"
#include "registrations.h"

namespace marlin::python {
namespace {

/// Raises a StatusError as the exception class of its code.
void TranslateErrors() {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const StatusError& error) {
      const nb::object raised = ErrorObject(error.code(), error.what());
      PyErr_SetObject(raised.type().ptr(), raised.ptr());
    }
  });
}

}  // namespace
}  // namespace marlin::python

NB_MODULE(_core, module) {
  namespace python = marlin::python;
  // Frameworks keep modules alive past the interpreter's end; do not warn users about it.
  nanobind::set_leak_warnings(false);
  module.doc() = "The C++ core of metal_marlin.";
  module.def("version", &marlin::Version, "The version of the library.");
  python::TranslateErrors();
  python::BindNames(module);
  python::BindWeights(module);
  python::BindProducts(module);
  python::BindExpertCalls(module);
  python::BindExperts(module);
  python::BindNamedCalls(module);
  python::BindMetal(module);
  python::BindMetalExperts(module);
  python::BindCheckpoints(module);
  python::BindModels(module);
  python::BindScheduler(module);
  python::BindDecoder(module);
  python::BindCommand(module);
}
