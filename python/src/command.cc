// The command line in this process, with a tokenizer and models of the Hub from Python.
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <typeinfo>

#include "base/printable.h"
#include "checkpoint/convert/conversion.h"
#include "checkpoint/convert/destination_output.h"
#include "cli/command_line.h"
#include "core.h"
#include "registrations.h"
#include "text/chat_request.h"
#include "text/examination.h"
#include "text/hub_name.h"
#include "text/serve_request.h"
#include "text/text_codec.h"

namespace marlin::python {
namespace {

/// The code of a Python exception; a MarlinError has the one that it was raised for.
Code CodeOf(nb::python_error& error) {
  const nb::object errors = nb::module_::import_("metal_marlin.errors");
  for (const Code code :
       {Code::kInvalidArgument, Code::kUnsupported, Code::kMalformedFile, Code::kNonFiniteInput,
        Code::kIo, Code::kOutOfMemory, Code::kDeviceLost}) {
    if (error.matches(errors.attr(ErrorClassName(code)))) return code;
  }
  return error.matches(PyExc_OSError)       ? Code::kIo
         : error.matches(PyExc_MemoryError) ? Code::kOutOfMemory
         : error.matches(PyExc_ValueError)  ? Code::kMalformedFile
                                            : Code::kUnsupported;
}

/// Calls into Python; turns exceptions into one line.
template <typename Body>
auto Guarded(Body body) -> Result<decltype(body())> {
  const nb::gil_scoped_acquire held;
  try {
    return body();
  } catch (nb::python_error& error) {
    return Status(CodeOf(error), TextOf(error.value()));
  } catch (const std::bad_cast&) {
    return Status(Code::kMalformedFile, "tokenizer: gives no token ids of 32 bits, or no text");
  }
}

nb::object OptionalText(const std::optional<std::string>& text) {
  return text ? nb::object(nb::bytes(text->data(), text->size())) : nb::none();
}

/// The arguments of Python's chat: texts as bytes, numbers, a function that prints a document, and
/// either what a server needs or a function that opens the model.
nb::dict ChatArgumentsOf(const ChatRequest& request) {
  nb::dict dict;
  dict["system"] = OptionalText(request.prompt.system);
  dict["variables"] = OptionalText(request.prompt.variables);
  dict["max_tokens"] = request.max_tokens ? nb::object(nb::int_(*request.max_tokens)) : nb::none();
  dict["stream"] = request.stream;
  dict["as_json"] = request.json;
  dict["quiet"] = request.quiet;
  dict["print_json"] = nb::cpp_function(
      [&request](const std::string& json) { return Take(request.print_json(json)); });
  if (request.url) {
    dict["url"] = OptionalText(request.url);
    dict["api_key"] = OptionalText(request.api_key);
    dict["sampling"] = OptionalText(request.sampling);
    return dict;
  }
  dict["template_file"] = OptionalText(request.prompt.file);
  dict["open_model"] = nb::cpp_function([&request] {
    GenerateOptions options;
    std::optional<Model> model;
    {
      const nb::gil_scoped_release released;
      model = Take(request.open(&options));
    }
    nb::dict sampling = SamplingDict(options.sampling);
    sampling["presence_penalty"] = options.sampling.presence_penalty;
    sampling["frequency_penalty"] = options.sampling.frequency_penalty;
    sampling["seed"] = options.sampling.seed;
    return nb::make_tuple(*model, sampling, options.speculation);
  });
  return dict;
}

/// The arguments of Python's serve, which has functions for the model and for a document, too.
nb::dict ServeArgumentsOf(const ServeRequest& request) {
  nb::dict dict;
  dict["compare"] = OptionalText(request.compare);
  dict["host"] = OptionalText(request.host);
  dict["port"] = request.port;
  dict["api_key"] = OptionalText(request.api_key);
  dict["no_api_key"] = request.no_api_key;
  nb::list origins;
  for (const std::string& origin : request.cors_origins) origins.append(OptionalText(origin));
  dict["cors_origins"] = origins;
  dict["model_name"] = OptionalText(request.model_name);
  dict["max_running"] = request.max_running;
  dict["max_waiting"] = request.max_waiting;
  dict["prefill_tokens"] = request.prefill_tokens;
  dict["prefix_cache"] = request.prefix_cache;
  dict["timeout"] = request.timeout_seconds;
  dict["template_file"] = OptionalText(request.template_file);
  dict["recipe"] = OptionalText(request.recipe);
  dict["as_json"] = request.json;
  dict["quiet"] = request.quiet;
  dict["open_model"] = nb::cpp_function([&request](nb::handle directory) {
    const std::string path = PathOf("directory", directory);
    const nb::gil_scoped_release released;
    return Take(request.open(path));
  });
  dict["speculation_of"] = nb::cpp_function([&request](const Model& model) {
    const nb::gil_scoped_release released;
    return Take(request.speculation(model));
  });
  dict["print_json"] = nb::cpp_function(
      [&request](const std::string& json) { return Take(request.print_json(json)); });
  return dict;
}

/// An object with encode_bytes(bytes, bool) -> list[int], decode(list[int]) -> str,
/// encode_chat(bytes, ...) -> list[int], check_same_tokens(str, path), chat(...), serve(...).
class PythonCodec final : public TextCodec {
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
  Result<std::vector<int32_t>> EncodeChat(std::string_view message,
                                          const ChatPrompt& chat) override {
    return Guarded([&] {
      return nb::cast<std::vector<int32_t>>(codec_.attr("encode_chat")(
          nb::bytes(message.data(), message.size()), OptionalText(chat.system),
          OptionalText(chat.file), OptionalText(chat.variables)));
    });
  }
  Status CheckSameTokens(std::string_view option, const std::string& directory) override {
    return Guarded([&] {
             codec_.attr("check_same_tokens")(nb::str(option.data(), option.size()),
                                              PathObject(directory));
             return true;
           })
        .status();
  }
  Status Chat(const ChatRequest& request) override {
    return Guarded([&] {
             codec_.attr("chat")(**ChatArgumentsOf(request));
             return true;
           })
        .status();
  }
  Status Serve(const ServeRequest& request) override {
    return Guarded([&] {
             codec_.attr("serve")(**ServeArgumentsOf(request));
             return true;
           })
        .status();
  }

 private:
  nb::object codec_;
};

std::string PartName(ModelPart part) {
  switch (part) {
    case ModelPart::kAll:
      return "all";
    case ModelPart::kHeaders:
      return "headers";
    case ModelPart::kConfig:
      return "config";
  }
  return {};
}

/// resolve(name, part, offline, quiet, verbose) -> path, as bytes; empty for None.
ModelResolver ResolverOf(const nb::object& resolve) {
  if (resolve.is_none()) return {};
  return [&resolve](const ModelRequest& request) {
    return Guarded([&] {
      const nb::object path = resolve(PathObject(request.name), PartName(request.part),
                                      request.offline, request.quiet, request.verbose);
      return PathOf("model", path);
    });
  };
}

/// examine(offline) -> the findings of `doctor` as JSON; empty for None.
Examination ExaminationOf(const nb::object& examine) {
  if (examine.is_none()) return {};
  return [&examine](bool offline) {
    return Guarded([&] { return nb::cast<std::string>(examine(offline)); });
  };
}

int RunCommand(const std::vector<nb::bytes>& arguments, const nb::object& make_codec,
               const nb::object& resolve_model, const nb::object& examine) {
  std::vector<std::string> copies;
  for (const nb::bytes& argument : arguments) {
    copies.emplace_back(argument.c_str(), argument.size());
  }
  std::vector<char*> argv;
  for (std::string& copy : copies) argv.push_back(copy.data());
  argv.push_back(nullptr);
  const TextCodecFactory factory =
      [&make_codec](const std::string& directory) -> Result<std::unique_ptr<TextCodec>> {
    return Guarded([&]() -> std::unique_ptr<TextCodec> {
      return std::make_unique<PythonCodec>(
          make_codec(nb::bytes(directory.data(), directory.size())));
    });
  };
  const nb::gil_scoped_release released;
  return cli::RunCommandLine(static_cast<int>(copies.size()), argv.data(), factory,
                             ResolverOf(resolve_model), ExaminationOf(examine));
}

/// (repository, revision, file), or None.
nb::object HubNameOf(nb::handle text) {
  const std::optional<HubName> name = ParseHubName(PathOf("name", text));
  if (!name) return nb::none();
  return nb::make_tuple(name->repository, name->revision, name->file);
}

/// (target, folder): the entry of ConversionTargets(), and the folder that holds the quantized
/// directory until the output is written.
nb::tuple DestinationOutput(const std::string& name, nb::handle output, bool overwrite) {
  const Destination destination = Take(FindDestination(name));
  const std::string path = PathOf("output", output);
  Check(CheckDestinationOutput(destination, path, overwrite));
  return nb::make_tuple(std::string(destination.target), Take(IntermediateFolder::Make(path)));
}

/// The destination's recipe for None; otherwise the recipe itself, checked.
MixedPrecisionConfig DestinationRecipe(const std::string& name, nb::handle source_path,
                                       nb::handle given) {
  const Destination destination = Take(FindDestination(name));
  const Checkpoint source = Take(Checkpoint::Open(PathOf("source", source_path)));
  if (given.is_none()) return Take(RecipeFor(destination, source));
  const auto& recipe = nb::cast<const MixedPrecisionConfig&>(given);
  Check(CheckRecipeFor(destination, source, recipe));
  return recipe;
}

/// The document of a command that runs in this process; `progress` may be None.
nb::object RunDocument(const std::vector<nb::bytes>& words, const nb::object& resolve_model,
                       const nb::object& progress) {
  std::vector<std::string> copies;
  for (const nb::bytes& word : words) copies.emplace_back(word.c_str(), word.size());
  CallbackError raised;
  std::optional<Result<std::string>> document;
  {
    const nb::gil_scoped_release released;
    document.emplace(
        cli::RunForDocument(copies, ResolverOf(resolve_model), [&](int64_t done, int64_t total) {
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
  nb::class_<StopText>(module, "StopText", "Cuts a text at the first of some stop strings.")
      .def(nb::init<std::vector<std::string>>(), nb::arg("stops"))
      .def("add", &StopText::Add, nb::arg("piece"), "What can be shown of the text so far.")
      .def("finish", &StopText::Finish, "The text held back, which began a stop string.")
      .def_prop_ro("stopped", &StopText::stopped);
  nb::class_<IntermediateFolder>(module, "IntermediateFolder",
                                 "Next to the output of quantize_model for a destination.")
      .def_prop_ro(
          "quantized", [](const IntermediateFolder& self) { return PathObject(self.quantized()); },
          "The path of the quantized directory.")
      .def("remove", &IntermediateFolder::Remove, "Removes the folder; lets others write.");
  module.def("destination_output", &DestinationOutput, nb::arg("name"), nb::arg("output"),
             nb::arg("overwrite"));
  module.def("destination_recipe", &DestinationRecipe, nb::arg("name"), nb::arg("source"),
             nb::arg("recipe").none());
  module.def("run_command", &RunCommand, nb::arg("arguments"), nb::arg("make_codec"),
             nb::arg("resolve_model") = nb::none(), nb::arg("examine") = nb::none(),
             "Runs metal-marlin with these arguments (the program's name first) and returns its "
             "exit code.");
  module.def(
      "is_side_file", [](const std::string& name) { return IsSideFile(name); }, nb::arg("name"),
      "Whether a file of a model's directory is copied with it: tokenizer, template, licence.");
  module.def(
      "parse_hub_name", &HubNameOf, nb::arg("name"),
      "The repository, revision and file of a model's name on the Hub; None for other text.");
  module.def(
      "printable",
      [](nb::handle text) { return TextObject(EscapeUnprintable(TextOf(text), Layout::kKept)); },
      nb::arg("text"), "Text that cannot control a terminal: other bytes become \\xNN.");
  module.def("run_document", &RunDocument, nb::arg("words"), nb::arg("resolve_model"),
             nb::arg("progress").none(),
             "Runs a command of metal-marlin with --json among `words` and returns its document; "
             "prints nothing.");
}

}  // namespace marlin::python
