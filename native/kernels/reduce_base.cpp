#define UNISONO_ISA base
#include "kernels/reduce.inl"
