// The module _core: errors as exceptions, and the parts of registrations.h.
#include <algorithm>
#include <string>

#include "core.h"
#include "registrations.h"

namespace marlin::python {
namespace {

/// A message as one line: names from files and tensors may contain anything.
nb::object LineObject(std::string line) {
  const auto breaks = [](char c) {
    return static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) == 0x7f;
  };
  std::replace_if(line.begin(), line.end(), breaks, '?');
  return TextObject(line);
}

/// Raises a StatusError as the exception class of its code.
void TranslateErrors() {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const StatusError& error) {
      const nb::object type =
          nb::module_::import_("metal_marlin.errors").attr(ErrorClassName(error.code()));
      PyErr_SetObject(type.ptr(), LineObject(error.what()).ptr());
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
  python::TranslateErrors();
  python::BindNames(module);
  python::BindWeights(module);
  python::BindProducts(module);
  python::BindExpertCalls(module);
  python::BindExperts(module);
  python::BindNamedCalls(module);
  python::BindMetal(module);
  python::BindCheckpoints(module);
  python::BindModels(module);
  python::BindDecoder(module);
  python::BindCommand(module);
}
