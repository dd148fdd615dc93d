"""How `unisono bench` measures: persistent processes of every system, in turns.

cases      what is measured: amounts, bandwidth factors, the lower bound of memory
inputs     values whose reduction is exact in any order, and the count of wrong ones
systems    the calls of unisono, gloo and MPI, as one rank makes them
devices    where ranks are: the CPU or GPUs; what is possible there, and what to note
device_systems  the calls of unisono, gloo and NCCL on CUDA arrays
worker     the process of one rank: it measures on command and answers
groups     starting the processes of a system, and sending them commands
driver     turns: every system measures the same size within the same second
figures    from times to rows: medians, percentiles, bandwidths, ratios
report     the table, JSON and CSV
progress   the line that shows what is being measured
plot       the picture
"""
