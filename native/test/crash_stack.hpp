// The stack of the thread that gets a fatal signal, native frames included.

#pragma once

namespace unisono {

// From now on a fatal signal writes it to `fd`, as it was opened, before all else that was
// to happen. Python's own handler (faulthandler) knows the frames of Python only.
void write_stack_on_crash(int fd);

} // namespace unisono
