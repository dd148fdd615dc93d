#define UNISONO_ISA avx512
#include "kernels/codec.inl"
