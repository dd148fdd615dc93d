// The part of the Python module that only tests use.

#pragma once

#include <nanobind/nanobind.h>

void bind_test_hooks(nanobind::module_ &m);
void bind_wire(nanobind::module_ &m);   // bind_wire.cpp
void bind_stream(nanobind::module_ &m); // bind_stream.cpp
void bind_device(nanobind::module_ &m); // bind_device.cpp
void bind_emulated(nanobind::module_ &m); // bind_emulated.cpp
void bind_forge_ucx(nanobind::module_ &m); // forge_ucx.cpp
void bind_program_tables(nanobind::module_ &m); // bind_program_tables.cpp
