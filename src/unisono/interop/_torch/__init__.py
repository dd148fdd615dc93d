"""What stands behind `unisono.interop.torch`.

meeting       how the ranks of a torch group find each other, and their communicator
tensors       tensors as the engine sees them, contiguous or by way of a copy
collectives   what torch calls, said to the engine; common to both adapters
running       one call, as it becomes calls of the engine
profiling     calls as torch's profiler shows them
pending       work in flight, its future, and errors that torch understands
process_group the adapter in Python: a `ProcessGroup`
compiled      the adapter in C++: a `c10d::Backend`, built for the torch that is there
              from backend.cpp, work.hpp and pool.hpp
adapters      which of the two
dynamo        what torch.compile must not look into
commands      `python -m unisono.interop.torch`
"""
