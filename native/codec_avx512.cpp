#define UNISONO_ISA avx512
#include "codec.inl"
