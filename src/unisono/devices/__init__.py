"""GPUs: arrays in their memory, and the kernel that runs programs on them."""
