"""WHO runs it. So far: the reductions that every executor needs.

kernels    several sources into one result, natively or in NumPy
"""
