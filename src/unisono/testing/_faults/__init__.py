"""The working parts of `unisono.testing.faults`.

records     what is asked for and what was seen, as it travels between processes
programs    what ranks do over and over until one of them is lost
ranks       one rank of a trial: meets, runs its program, tells how it ended
server      a process that has everything imported, and forks the ranks of trials
"""
