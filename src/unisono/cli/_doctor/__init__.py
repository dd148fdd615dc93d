"""What `unisono doctor` is made of.

host     what one host has: limits, memory, names, interfaces; run on each
rank     what a small world measures: results, clocks, every pair of ranks
report   findings as lines, matrices as tables
"""
