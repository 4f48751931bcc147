// Python's Decoder: a whole model as one call.
#pragma once

#include <nanobind/nanobind.h>

namespace ktqueue {

void bind_decoder(nanobind::module_& module);

}  // namespace ktqueue
