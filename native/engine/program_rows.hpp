// The rows of a program's tables, as native/lower and src/unisono/runtime/plan/programs.py
// write them. The engine and the interpreter for devices read the same tables; a device's
// compiler has no standard library.

#pragma once

#ifndef UNISONO_RTC
#include <cstdint>
#endif

namespace unisono::rows {

// Where a source lies.
enum Home : std::int32_t { input = 0, output = 1, window = 2, stream = 3, code = 4 };

struct Source {
  std::int32_t home, rank, index;
};

struct Wait {
  std::int32_t rank, count;
};

struct Action {
  std::int32_t chunk, window, output, completes; // -1: not written there
  std::int32_t first_source, end_source, first_wait, end_wait;
  std::int32_t first_delivery, end_delivery;
  // index of its code, or -1; whether it then stores the decoded code
  std::int32_t code, back;
  std::int32_t is_awaited; // whether another rank waits for it
};

} // namespace unisono::rows
