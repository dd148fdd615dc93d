#define UNISONO_ISA avx2
#include "kernels/reduce.inl"
