// The parts of the Python module, each registered by the file that defines it.

#pragma once

#include <nanobind/nanobind.h>

void bind_engine(nanobind::module_ &m);
void bind_wire(nanobind::module_ &m);
void bind_simulate(nanobind::module_ &m);
