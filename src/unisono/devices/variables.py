"""Environment variables that are read before anything of a GPU is used."""

ENGINE = "UNISONO_CUDA_ENGINE"
"""Who carries out calls on CUDA arrays: "unisono" or "nccl"."""
