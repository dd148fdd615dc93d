#define UNISONO_ISA base
#include "kernels.inl"
