"""WHO runs it: communicators, and what they are made of.

start          init: find the world and meet the others
environment    which rank am I, asked of whoever started this process
place          where ranks of several hosts meet, asked of the same
communicator   the public face: collectives, messages, groups, objects
base           what every call goes through: plan, run, explain failures
calls          from arguments to buffers and counts
plans          verified schedules made concrete: layouts, pieces, fingerprints
select         which algorithm a call gets
buffers        arrays as addresses; operations: reductions as users name them
functions      reductions that run in Python
groups         split, objects, uneven exchanges
work           the handle of a call in flight
failures       verdicts made into errors; recorder: the last calls; report: explain
objects        Python objects as bytes, without pickle
kernels        several sources into one result, natively or in NumPy
launch, spawn  ranks as processes of this host
fleet          ranks on several hosts: links to an agent on each, hosts by name
overseer       what launch and fleet share; orders: what fleet and agent say
outcome        how a job ended; lines: what ranks print; parcels: errors that travel
"""
