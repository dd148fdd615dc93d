#define UNISONO_ISA base
#include "codec.inl"
