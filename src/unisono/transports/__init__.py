"""HOW bytes move: the memory that ranks share, between threads or between processes.

base      what a communicator asks of a transport
memory    ranks as threads of one process
shm       ranks as processes of one host
"""
