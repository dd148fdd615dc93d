"""What `unisono doctor` is made of.

host     what one host has: limits, memory, names, interfaces; run on each
rank     what a small world finds out: answers, clocks, every pair of ranks
report   findings as lines, matrices as tables
"""
