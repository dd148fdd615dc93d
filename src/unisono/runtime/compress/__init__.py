"""Sums over the ranks for which less is sent than the whole tensor.

all_reduce      `codec="topk:0.01"` and such in one call
sums            the base class of a compressed sum
sparse          top-k and random-k
powersgd        low-rank factors
error_feedback  dense codecs whose error is added to the next sum
"""
