// The parts of the Python module. Each function registers the classes and functions of one file.
#pragma once

#include <nanobind/nanobind.h>

namespace ktqueue {

void bind_weights(nanobind::module_& module);
void bind_decoder(nanobind::module_& module);
void bind_handoff(nanobind::module_& module);
void bind_probe(nanobind::module_& module);

}  // namespace ktqueue
