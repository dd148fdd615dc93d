"""Failure trials: ranks run collectives until one of them is killed or stopped.

trials      random trials, the server that runs them, and a summary of many
records     trials and their outcomes, as they travel between processes
programs    what ranks do in a loop until one of them is lost
rank        one rank of a trial: joins the world, runs its program, reports
server      a process that has imported everything and forks the ranks of trials
checks      whether the survivors' errors are right
"""
