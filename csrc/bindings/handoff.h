// Python's Handoff: the service of handoff/handoff.h, with what it uses kept alive.
#pragma once

#include <nanobind/nanobind.h>

namespace ktqueue {

void bind_handoff(nanobind::module_& module);

}  // namespace ktqueue
