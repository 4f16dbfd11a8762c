// The scheduler: requests that come and go while a batch runs.
#include "marlin/scheduler.h"

#include <fmt/core.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core.h"
#include "marlin/model.h"
#include "registrations.h"
#include "text_options.h"

namespace marlin::python {
namespace {

using Tokens = std::vector<int32_t>;

/// The options of a scheduler, with the names of Scheduler.__init__.
void MakeScheduler(Scheduler* self, const Model& model, int64_t max_running, int64_t max_waiting,
                   int64_t prefill_tokens, bool prefix_cache,
                   const std::optional<SpeculationOptions>& speculation) {
  const SchedulerOptions options{.max_running = max_running,
                                 .max_waiting = max_waiting,
                                 .prefill_tokens = prefill_tokens,
                                 .prefix_cache = prefix_cache,
                                 .speculation = speculation.value_or(SpeculationOptions())};
  const nb::gil_scoped_release released;
  new (self) Scheduler(Take(Scheduler::Make(model, options)));
}

[[noreturn]] void RaiseQueueFull(const SchedulerStatistics& statistics) {
  const nb::object type = nb::module_::import_("metal_marlin.errors").attr("QueueFullError");
  PyErr_SetString(type.ptr(), fmt::format("the queue is full: {} requests run and {} wait",
                                          statistics.running, statistics.waiting)
                                  .c_str());
  throw nb::python_error();
}

int64_t SubmitRequest(Scheduler& self, const Tokens& prompt, const TextOptions& options,
                      int64_t logprobs, bool prompt_logprobs, std::string cache_salt,
                      bool constrained) {
  if (!options.callback.is_none()) Refuse("options: expected no callback; step returns tokens");
  Request request{.prompt = prompt,
                  .options = GenerateOptionsOf(options),
                  .logprobs = logprobs,
                  .prompt_logprobs = prompt_logprobs,
                  .cache_salt = std::move(cache_salt),
                  .constrained = constrained};
  std::optional<int64_t> id;
  {
    const nb::gil_scoped_release released;
    id = Take(self.Submit(std::move(request)));
  }
  if (!id.has_value()) RaiseQueueFull(self.statistics());
  return *id;
}

void SetAllowedTokens(Scheduler& self, int64_t id, const Array& mask) {
  const TensorView view = ViewOf("mask", mask);
  if (view.dtype() != DType::kU32 || view.rank() != 1) {
    Refuse("mask: expected a vector of uint32");
  }
  std::vector<uint32_t> words;
  for (int64_t i = 0; i < view.dim(0); ++i) {
    words.push_back(view.As<uint32_t>()[i * view.stride(0)]);
  }
  const nb::gil_scoped_release released;
  Check(self.SetAllowed(id, std::move(words)));
}

std::vector<Event> RunStep(Scheduler& self, double idle_seconds) {
  if (!(idle_seconds >= 0)) {
    Refuse(fmt::format("idle_seconds: expected 0 or more, got {}", idle_seconds));
  }
  // The scheduler waits for an hour at most; a longer time may not fit into milliseconds.
  const double milliseconds = std::ceil(1000 * std::min(idle_seconds, 3600.0));
  std::vector<Event> events;
  const nb::gil_scoped_release released;
  Check(self.Step(std::chrono::milliseconds(static_cast<int64_t>(milliseconds)), &events));
  return events;
}

nb::dict StatisticsOf(const Scheduler& self) {
  const SchedulerStatistics statistics = self.statistics();
  nb::dict dict;
  dict["running"] = statistics.running;
  dict["waiting"] = statistics.waiting;
  dict["pages_used"] = statistics.pages_used;
  dict["pages_cached"] = statistics.pages_cached;
  dict["page_tokens"] = statistics.page_tokens;
  dict["page_groups"] = statistics.page_groups;
  dict["pages"] = statistics.pages;
  dict["prompt_tokens"] = statistics.prompt_tokens;
  dict["cached_tokens"] = statistics.cached_tokens;
  dict["generated_tokens"] = statistics.generated_tokens;
  dict["draft_tokens"] = statistics.draft_tokens;
  dict["accepted_tokens"] = statistics.accepted_tokens;
  dict["put_back"] = statistics.put_back;
  return dict;
}

nb::object EndedOf(const Event& event) {
  if (!event.status.ok()) return nb::str("error");
  if (!event.ended.has_value()) return nb::none();
  const std::string_view name = StopReasonName(*event.ended);
  return nb::str(name.data(), name.size());
}

nb::object ErrorOf(const Event& event) {
  if (event.status.ok()) return nb::none();
  return ErrorObject(event.status.code(), event.status.message());
}

/// (log-probability, [(token, log-probability), ...])
nb::tuple LogprobsObject(const TokenLogprobs& logprobs) {
  nb::list top;
  for (const TokenLogprob& one : logprobs.top) top.append(nb::make_tuple(one.token, one.logprob));
  return nb::make_tuple(logprobs.token.logprob, top);
}

nb::list LogprobsOf(const Event& event) {
  nb::list list;
  for (const TokenLogprobs& logprobs : event.logprobs) list.append(LogprobsObject(logprobs));
  return list;
}

/// One element per token of the prompt; the first token has none.
nb::list PromptLogprobsOf(const Event& event) {
  nb::list list;
  if (event.prompt_logprobs.empty()) return list;
  list.append(nb::none());
  for (const TokenLogprobs& logprobs : event.prompt_logprobs) {
    list.append(LogprobsObject(logprobs));
  }
  return list;
}

void BindEvent(nb::module_& module) {
  nb::class_<Event>(module, "Event", "What happened to a request in a pass.")
      .def_ro("id", &Event::id)
      .def_prop_ro("tokens", [](const Event& self) { return self.tokens; })
      .def_prop_ro("ended", &EndedOf, nb::sig("def ended(self) -> str | None"),
                   "None, or why the request has ended.")
      .def_prop_ro("error", &ErrorOf, nb::sig("def error(self) -> Exception | None"),
                   "The error with which the request has ended.")
      .def_prop_ro("logprobs", &LogprobsOf,
                   nb::sig("def logprobs(self) -> list[tuple[float, list[tuple[int, float]]]]"))
      .def_prop_ro(
          "prompt_logprobs", &PromptLogprobsOf,
          nb::sig(
              "def prompt_logprobs(self) -> list[tuple[float, list[tuple[int, float]]] | None]"))
      .def_ro("cached_tokens", &Event::cached_tokens)
      .def_ro("waited_seconds", &Event::waited_seconds)
      .def_ro("prefill_seconds", &Event::prefill_seconds)
      .def_ro("decode_seconds", &Event::decode_seconds)
      .def_prop_ro("drafted", [](const Event& self) { return self.drafts.drafted; })
      .def_prop_ro("accepted", [](const Event& self) { return self.drafts.accepted; });
}

}  // namespace

void BindScheduler(nb::module_& module) {
  BindEvent(module);
  nb::class_<Scheduler>(module, "Scheduler",
                        "Continuous batching of requests: submit, cancel, wake and statistics from "
                        "any thread, step from one.")
      .def("__init__", &MakeScheduler, nb::arg("model"), nb::kw_only(), nb::arg("max_running") = 0,
           nb::arg("max_waiting") = 256, nb::arg("prefill_tokens") = 0,
           nb::arg("prefix_cache") = true, nb::arg("speculation").none() = nb::none())
      .def("submit", &SubmitRequest, nb::arg("prompt"), nb::arg("options"), nb::kw_only(),
           nb::arg("logprobs") = -1, nb::arg("prompt_logprobs") = false, nb::arg("cache_salt") = "",
           nb::arg("constrained") = false,
           "Adds a request and returns its id; QueueFullError if too many wait.")
      .def("cancel", &Scheduler::Cancel, nb::arg("id"),
           "Ends a request before the next pass, as \"stopped\".")
      .def("set_allowed", &SetAllowedTokens, nb::arg("id"), nb::arg("mask"),
           "Lets a constrained request sample its next token: bit i % 32 of mask[i // 32] allows "
           "token i.")
      .def("step", &RunStep, nb::arg("idle_seconds"),
           "Runs one pass and returns what happened; waits at most that long for work.")
      .def("wake", &Scheduler::Wake, "Lets step return although there is no work.")
      .def_prop_ro("statistics", &StatisticsOf, nb::sig("def statistics(self) -> dict[str, int]"));
}

}  // namespace marlin::python
