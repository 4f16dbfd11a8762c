// Operations that the design documents name: products of selected experts, stripes along k, and the
// cache of experts.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "core.h"
#include "device_arrays.h"
#include "marlin/expert_cache.h"
#include "marlin/kernels.h"
#include "ready_weights.h"
#include "registrations.h"

namespace marlin::python {
namespace {

void RunExpertGemm(const ReadyWeights& matrices, nb::handle x, nb::handle ids, nb::handle weights,
                   nb::handle out, uintptr_t stream_handle) {
  const OpenDevice& on = matrices.device;
  const DeviceInput from("activations", x, on);
  const DeviceInput chosen("expert_ids", ids, on);
  const DeviceInput factors("expert_probs", weights, on);
  const DeviceOutput to("out", out, on);
  GemmOptions options;
  options.stream = reinterpret_cast<void*>(stream_handle);
  const nb::gil_scoped_release released;
  Check(ExpertGemm(on.device, from.view(), matrices.weights, chosen.view(), factors.view(),
                   to.view(), options));
  Check(to.Finish(on, options.stream));
}

/// Striped weights and their device.
struct ReadyStripes {
  kernels::StripedWeights weights;
  OpenDevice device;
};

void RunStriped(const ReadyStripes& ready, nb::handle x, nb::handle out, nb::handle bias,
                uintptr_t stream_handle) {
  const OpenDevice& on = ready.device;
  const DeviceInput from("x", x, on);
  const DeviceOutput to("out", out, on);
  DeviceInput added;
  GemmOptions options;
  options.stream = reinterpret_cast<void*>(stream_handle);
  if (!bias.is_none()) {
    added = DeviceInput("bias", bias, on);
    options.bias = added.view();
  }
  const nb::gil_scoped_release released;
  Check(
      kernels::quantized_linear_striped(on.device, from.view(), ready.weights, to.view(), options));
  Check(to.Finish(on, options.stream));
}

CachePolicy ParsePolicy(const std::string& name) {
  if (name == "lru") return CachePolicy::kLru;
  if (name == "frequency") return CachePolicy::kFrequency;
  Refuse("policy: unknown name '" + name + "'; known: lru, frequency");
}

/// An expert in use; its matrices stay in the cache until Release.
class Lease {
 public:
  Lease(ExpertLease lease, OpenDevice device)
      : lease_(std::move(lease)), device_(std::move(device)) {}

  /// (gate, up, down); None for a matrix that the expert lacks.
  nb::tuple Matrices() const {
    if (!lease_) {
      Refuse("lease: was released");
    }
    const Expert& expert = lease_->expert();
    return nb::make_tuple(MatrixOf(expert.gate), MatrixOf(expert.up), MatrixOf(expert.down));
  }
  void Release() { lease_.reset(); }

 private:
  nb::object MatrixOf(const ExpertMatrix& matrix) const {
    if (!matrix.weights.valid()) return nb::none();
    return nb::cast(ReadyWeights{matrix.weights, device_});
  }

  std::optional<ExpertLease> lease_;
  OpenDevice device_;
};

class Cache {
 public:
  Cache(OpenDevice device, const ExpertCacheOptions& options)
      : device_(std::move(device)), cache_(std::make_unique<ExpertCache>(options)) {}

  Lease Get(int64_t layer, int64_t expert, int64_t bytes, const nb::object& load) const {
    std::exception_ptr raised;
    const auto call = [&](const ExpertKey& key) -> Result<Expert> {
      const nb::gil_scoped_acquire held;
      try {
        return ExpertOf(load(key.layer, key.expert));
      } catch (...) {
        raised = std::current_exception();
        return Invalid("load: raised an exception");
      }
    };
    std::optional<Result<ExpertLease>> found;
    {
      const nb::gil_scoped_release released;
      found.emplace(cache_->Get({layer, expert}, bytes, call));
    }
    if (raised) std::rethrow_exception(raised);
    return {Take(*std::move(found)), device_};
  }
  void Pin(int64_t layer, int64_t expert) const { Check(cache_->Pin({layer, expert})); }
  void Unpin(int64_t layer, int64_t expert) const { Check(cache_->Unpin({layer, expert})); }

  nb::dict Statistics() const {
    const ExpertCacheStatistics counts = cache_->statistics();
    nb::dict made;
    made["hits"] = counts.hits;
    made["misses"] = counts.misses;
    made["evictions"] = counts.evictions;
    made["loaded_bytes"] = counts.loaded_bytes;
    made["entries"] = counts.entries;
    made["bytes"] = counts.bytes;
    return made;
  }
  const OpenDevice& device() const { return device_; }

 private:
  Expert ExpertOf(const nb::object& loaded) const {
    const auto refuse = [](const std::string& message) { Refuse(message); };
    std::vector<nb::object> parts;
    if (!nb::try_cast(loaded, parts) || parts.size() != 3) {
      refuse("load: expected (gate, up, down) of prepared weights");
    }
    const auto matrix = [&](const nb::object& part) {
      if (part.is_none()) return ExpertMatrix();
      if (!nb::isinstance<ReadyWeights>(part)) {
        refuse(std::string("load: expected prepared weights, got ") +
               nb::type_name(part.type()).c_str());
      }
      const auto& ready = nb::cast<const ReadyWeights&>(part);
      if (ready.device.device != device_.device) {
        refuse("load: expected weights prepared for the cache's device, " + device_.name +
               ", got weights for " + ready.device.name);
      }
      return ExpertMatrix{ready.weights, 0, {}};
    };
    return {matrix(parts[0]), matrix(parts[1]), matrix(parts[2])};
  }

  OpenDevice device_;
  // Behind a pointer, because the class of C++ has no const Get.
  std::unique_ptr<ExpertCache> cache_;
};

}  // namespace

void BindNamedCalls(nb::module_& module) {
  module.def("expert_gemm", &RunExpertGemm, nb::arg("matrices"), nb::arg("x"), nb::arg("ids"),
             nb::arg("weights"), nb::arg("out"), nb::arg("stream") = 0,
             "out[t] = the sum over s of weights[t, s] * x[t] matrices[ids[t, s]].");
  nb::class_<ReadyStripes>(module, "StripedWeights", "Weights cut along k, for a device.")
      .def_prop_ro("k", [](const ReadyStripes& w) { return w.weights.k; })
      .def_prop_ro("n", [](const ReadyStripes& w) { return w.weights.n; })
      .def_prop_ro("first_k", [](const ReadyStripes& w) { return w.weights.first_k; });
  module.def(
      "prepare_stripes",
      [](const QuantizedWeights& weights, const OpenDevice& on, int64_t parallel) {
        const nb::gil_scoped_release released;
        return ReadyStripes{Take(kernels::PrepareStripes(weights, on.device, parallel)), on};
      },
      nb::arg("weights"), nb::arg("device"), nb::arg("parallel"));
  module.def("striped_linear", &RunStriped, nb::arg("weights"), nb::arg("x"), nb::arg("out"),
             nb::arg("bias").none(), nb::arg("stream") = 0);
  nb::class_<Lease>(
      module, "ExpertLease",
      "An expert of an ExpertCache in use: (gate, up, down) in a `with` statement, at "
      "whose end it may be evicted.")
      .def("release", &Lease::Release)
      .def_prop_ro("matrices", &Lease::Matrices, "(gate, up, down), prepared weights or None.")
      .def("__enter__", &Lease::Matrices)
      .def("__exit__", [](Lease& lease, const nb::args&) { lease.Release(); });
  nb::class_<Cache>(
      module, "ExpertCache",
      "Keeps the experts that were used lately (policy \"lru\") or often (\"frequency\") in memory "
      "of bounded size: quantized weights, or weights decoded to 16 bits. Thread-safe.")
      .def(
          "__init__",
          [](Cache* self, int64_t capacity_bytes, const std::string& policy, int64_t half_life,
             const OpenDevice& device) {
            const auto refuse = [](const char* name, int64_t least, int64_t given) {
              Refuse(std::string(name) + ": expected " + std::to_string(least) + " or more, got " +
                     std::to_string(given));
            };
            if (capacity_bytes < 0) refuse("capacity_bytes", 0, capacity_bytes);
            if (half_life < 1) refuse("half_life", 1, half_life);
            new (self) Cache(device, {capacity_bytes, ParsePolicy(policy), half_life});
          },
          nb::arg("capacity_bytes"), nb::arg("policy"), nb::arg("half_life"), nb::arg("device"))
      .def("get", &Cache::Get, nb::arg("layer"), nb::arg("expert"), nb::arg("nbytes"),
           nb::arg("load"),
           "An ExpertLease. A miss makes room for nbytes, the size of the prepared weights, and "
           "calls load(layer, expert), which returns (gate, up, down) for the cache's device, each "
           "PreparedWeights or None; an exception in it propagates. InvalidArgumentError for an "
           "expert larger than the capacity or than nbytes, OutOfMemoryError if what is leased or "
           "pinned leaves no room.")
      .def("pin", &Cache::Pin, nb::arg("layer"), nb::arg("expert"),
           "Keeps an expert that is there until it is unpinned as often.")
      .def("unpin", &Cache::Unpin, nb::arg("layer"), nb::arg("expert"),
           "Undoes one pin of an expert.")
      .def_prop_ro(
          "statistics", &Cache::Statistics,
          "{\"hits\", \"misses\", \"evictions\", \"loaded_bytes\", \"entries\", \"bytes\"}")
      .def_prop_ro("device", &Cache::device, "The device that loaders prepare weights for.");
}

}  // namespace marlin::python
