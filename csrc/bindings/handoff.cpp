#include "handoff/handoff.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "bindings/module.h"
#include "bindings/weights.h"

namespace ktqueue {
namespace {

// The addresses of input, output, request word and done word.
using Addresses = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t>;

// The hand-off with the Python objects that it uses. `kept` owns the memory. It and the layers are released only when
// no thread can use them.
class BoundHandoff {
  public:
    BoundHandoff(size_t hidden, size_t experts_per_token, size_t max_tokens, const Addresses& memory, nb::object kept,
                 bool serve, double idle_seconds, double stuck_seconds)
        : shape_{hidden, experts_per_token, max_tokens},
          handoff_(shape_, parse(memory), serve, {idle_seconds, stuck_seconds}) {
        kept_.push_back(std::move(kept));
    }
    BoundHandoff(const BoundHandoff&) = delete;

    ~BoundHandoff() { close(1); }

    size_t add_layer(nb::object layer) {
        const size_t number = handoff_.add_layer(nb::cast<const BoundExpertLayer&>(layer).layer());
        kept_.push_back(std::move(layer));
        return number;
    }

    bool close(double seconds) {
        bool ended;
        {
            nb::gil_scoped_release release;
            ended = handoff_.close(seconds);
        }
        if (!ended)
            for (nb::object& object : kept_) object.release();  // kept until the process exits
        return ended;
    }

    Handoff& handoff() { return handoff_; }
    const HandoffShape& shape() const { return shape_; }

  private:
    static HandoffMemory parse(const Addresses& memory) {
        const auto& [input, out, request, done] = memory;
        return {reinterpret_cast<uint8_t*>(input), reinterpret_cast<float*>(out), reinterpret_cast<void*>(request),
                reinterpret_cast<void*>(done)};
    }

    HandoffShape shape_;
    std::vector<nb::object> kept_;
    Handoff handoff_;
};

}  // namespace

void bind_handoff(nb::module_& module) {
    nb::class_<BoundHandoff>(module, "Handoff")
        .def(nb::init<size_t, size_t, size_t, const Addresses&, nb::object, bool, double, double>(), nb::arg("hidden"),
             nb::arg("experts_per_token"), nb::arg("max_tokens"), nb::arg("memory"), nb::arg("kept"), nb::arg("serve"),
             nb::arg("idle_seconds"), nb::arg("stuck_seconds"))
        .def("add_layer", &BoundHandoff::add_layer, nb::arg("layer"))
        .def(
            "run",
            [](BoundHandoff& bound, uint32_t word) {
                nb::gil_scoped_release release;
                bound.handoff().run(word);
            },
            nb::arg("word"))
        .def(
            "host_task",
            [](BoundHandoff& bound, uint32_t word) {
                return reinterpret_cast<uintptr_t>(bound.handoff().host_task(word));
            },
            nb::arg("word"))
        .def_prop_ro_static("host_function",
                            [](nb::handle) { return reinterpret_cast<uintptr_t>(&Handoff::run_host_function); })
        .def(
            "x_offset", [](const BoundHandoff& bound, size_t tokens) { return bound.shape().x_offset(tokens); },
            nb::arg("tokens"))
        .def(
            "predicted_offset",
            [](const BoundHandoff& bound, size_t tokens) { return bound.shape().predicted_offset(tokens); },
            nb::arg("tokens"))
        .def("take_error", [](BoundHandoff& bound) { return bound.handoff().take_error(); })
        .def("statistics",
             [](BoundHandoff& bound) {
                 const HandoffStatistics now = bound.handoff().statistics();
                 return std::make_tuple(now.tasks, now.failed, now.busy_seconds, now.experts_used, now.bytes,
                                        now.predicted, now.predicted_used);
             })
        .def("uses", [](BoundHandoff& bound) { return bound.handoff().uses(); })
        .def("close", &BoundHandoff::close, nb::arg("seconds"));
}

}  // namespace ktqueue
