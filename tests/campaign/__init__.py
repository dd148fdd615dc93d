"""The campaign: random worlds, random calls and random disturbances, all from a seed.

    python tests/campaign --minutes 10               random trials
    python tests/campaign --seed 123 --trial 7       one of them again, alone
    python tests/campaign --soak --minutes 60        one world for long

plan      what a trial is, and how one is drawn from a seed and a number
calls     what ranks call, and what must come of it, to the bit
rank      one rank: it works, is disturbed, shrinks, goes on, and leaves nothing behind
threads   a trial whose ranks are threads of one process
driver    forks the ranks of a trial, disturbs them, and listens
judge     whether what was seen is what is promised
leftovers what a process still holds of its world
report    many trials in numbers
soak      one world for long
"""
