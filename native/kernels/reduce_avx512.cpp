#define UNISONO_ISA avx512
#include "kernels/reduce.inl"
