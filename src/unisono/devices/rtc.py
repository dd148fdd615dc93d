"""Placeholder until merged."""
from __future__ import annotations


def compile_kernel(capability: tuple[int, int], dtype: str, op: str) -> bytes:
    raise NotImplementedError
