#define UNISONO_ISA avx2
#include "codec.inl"
