// Python's machine probe. The called functions check the arguments.
#include <nanobind/stl/string.h>

#include "bindings/module.h"
#include "probe/machine_probe.h"

namespace nb = nanobind;

namespace ktqueue {

namespace {

// (isa, arithmetic, instruction) of each loop that can be measured on this CPU.
nb::list peaks() {
    nb::list found;
    for (const ProbeTable* probes : available_probes())
        for (size_t i = 0; i < kArithmeticCount; ++i)
            if (const PeakLoop& loop = probes->peaks[i]; loop.run)
                found.append(
                    nb::make_tuple(probes->isa, arithmetic_name(static_cast<Arithmetic>(i)), loop.instruction));
    return found;
}

double peak(const std::string& isa, const std::string& arithmetic, size_t threads, double seconds, size_t repeats) {
    return measure_peak(isa, parse_arithmetic(arithmetic), threads, seconds, repeats);
}

}  // namespace

void bind_probe(nb::module_& module) {
    using Released = nb::call_guard<nb::gil_scoped_release>;
    module.def("peaks", &peaks);
    module.def("peak", &peak, nb::arg("isa"), nb::arg("arithmetic"), nb::arg("threads"), nb::arg("seconds"),
               nb::arg("repeats"), Released());
    nb::class_<ReadProbe>(module, "ReadProbe")
        .def(nb::init<size_t>(), nb::arg("size"), Released())
        .def("measure", &ReadProbe::measure, nb::arg("size"), nb::arg("threads"), nb::arg("rounds"), nb::arg("repeats"),
             nb::arg("prefetch"), Released())
        .def_prop_ro("bytes", &ReadProbe::bytes);
}

}  // namespace ktqueue
