// The command line in this process, with a tokenizer from Python.
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <typeinfo>

#include "cli/arguments.h"
#include "cli/text_codec.h"
#include "core.h"

namespace marlin::python {
namespace {

/// Calls into Python; turns exceptions into one line.
template <typename Body>
auto Guarded(Body body) -> Result<decltype(body())> {
  const nb::gil_scoped_acquire held;
  try {
    return body();
  } catch (nb::python_error& error) {
    const Code code = error.matches(PyExc_OSError)       ? Code::kIo
                      : error.matches(PyExc_MemoryError) ? Code::kOutOfMemory
                      : error.matches(PyExc_ValueError)  ? Code::kMalformedFile
                                                         : Code::kUnsupported;
    return Status(code, TextOf(error.value()));
  } catch (const std::bad_cast&) {
    return Status(Code::kMalformedFile, "tokenizer: gives no token ids of 32 bits, or no text");
  }
}

/// An object with encode_bytes(bytes, bool) -> list[int], decode(list[int]) -> str.
class PythonCodec final : public cli::TextCodec {
 public:
  explicit PythonCodec(nb::object codec) : codec_(std::move(codec)) {}
  ~PythonCodec() override {
    const nb::gil_scoped_acquire held;
    codec_.reset();
  }

  Result<std::vector<int32_t>> Encode(std::string_view text, bool special) override {
    return Guarded([&] {
      return nb::cast<std::vector<int32_t>>(
          codec_.attr("encode_bytes")(nb::bytes(text.data(), text.size()), special));
    });
  }
  Result<std::string> Decode(std::span<const int32_t> tokens) override {
    return Guarded([&] {
      return nb::cast<std::string>(
          codec_.attr("decode")(std::vector<int32_t>(tokens.begin(), tokens.end())));
    });
  }

 private:
  nb::object codec_;
};

int RunCommand(const std::vector<nb::bytes>& arguments, const nb::object& make_codec) {
  std::vector<std::string> copies;
  for (const nb::bytes& argument : arguments) {
    copies.emplace_back(argument.c_str(), argument.size());
  }
  std::vector<char*> argv;
  for (std::string& copy : copies) argv.push_back(copy.data());
  argv.push_back(nullptr);
  const cli::TextCodecFactory factory =
      [&make_codec](const std::string& directory) -> Result<std::unique_ptr<cli::TextCodec>> {
    return Guarded([&]() -> std::unique_ptr<cli::TextCodec> {
      return std::make_unique<PythonCodec>(
          make_codec(nb::bytes(directory.data(), directory.size())));
    });
  };
  const nb::gil_scoped_release released;
  return cli::RunCommandLine(static_cast<int>(copies.size()), argv.data(), factory);
}

/// The document of a command that runs in this process; `progress` may be None.
nb::object RunDocument(const std::vector<nb::bytes>& words, const nb::object& progress) {
  std::vector<std::string> copies;
  for (const nb::bytes& word : words) copies.emplace_back(word.c_str(), word.size());
  CallbackError raised;
  std::optional<Result<std::string>> document;
  {
    const nb::gil_scoped_release released;
    document.emplace(cli::RunForDocument(copies, [&](int64_t done, int64_t total) {
      raised.Run([&] {
        if (!progress.is_none()) progress(done, total);
      });
    }));
  }
  raised.Rethrow();
  return DocumentObject(Take(*std::move(document)));
}

}  // namespace

void BindCommand(nb::module_& module) {
  nb::class_<cli::StopText>(module, "StopText", "Cuts a text at the first of some stop strings.")
      .def(nb::init<std::vector<std::string>>(), nb::arg("stops"))
      .def("add", &cli::StopText::Add, nb::arg("piece"), "What can be shown of the text so far.")
      .def("finish", &cli::StopText::Finish, "The text held back, which began a stop string.")
      .def_prop_ro("stopped", &cli::StopText::stopped);
  module.def("run_command", &RunCommand, nb::arg("arguments"), nb::arg("make_codec"),
             "Runs metal-marlin with these arguments (the program's name first) and returns its "
             "exit code.");
  module.def("run_document", &RunDocument, nb::arg("words"), nb::arg("progress").none(),
             "Runs a command of metal-marlin with --json among `words` and returns its document; "
             "prints nothing.");
}

}  // namespace marlin::python
