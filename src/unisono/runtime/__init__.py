"""Communicators: making a world, making calls, planning them, observing them.

communicator        the public class; it delegates to what follows
core                what every call goes through: plan, run, report failure
groups              split, duplicate
object_collectives  collectives of Python objects
python_reductions   reductions by a user's function
call/               one call: arguments, buffers, options, the handle of work in flight
plan/               verified schedules made concrete; choice of algorithm
observe/            error messages, flight recorder, trace, monitor, explain
compress/           all_reduce by top-k, random-k, PowerSGD; error feedback
world/              init, rendezvous, membership; shrink and grow

Imports run downwards: world, communicator, compress, groups, core, observe, plan, call.
"""
