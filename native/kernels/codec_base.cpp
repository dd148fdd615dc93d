#define UNISONO_ISA base
#include "kernels/codec.inl"
