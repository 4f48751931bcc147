// Registers the machine probe with the extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace ktqueue {

void bind_probe(nanobind::module_& module);

}  // namespace ktqueue
