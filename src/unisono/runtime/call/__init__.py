"""One call, before a schedule is chosen.

arguments      from a user's arguments to buffers and counts, a function per collective
buffers        arrays as the engine sees them: address, shape, element type
options        what any collective can be given beside its arguments; timeouts
reductions     reductions as users name them
notes          a call in words and as the record that other ranks can read
objects        Python objects as bytes, without pickle; object_arrays: arrays in them
work           the handle of a call in flight
connecting     waiting for a connection with the limits of a call
"""
