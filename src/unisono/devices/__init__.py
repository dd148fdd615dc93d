"""GPUs: the kernel that runs programs on them, compiled where it is needed."""
