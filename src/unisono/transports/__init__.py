"""HOW bytes move: the memory that ranks share, and how ranks on several hosts meet.

base        what a communicator asks of a transport
memory      ranks as threads of one process
shm         ranks as processes of one host
tcp         ranks on several hosts
streams     the connections that their data takes

secret      what the ranks of a job hold and nobody else
handshake   how two of them make sure of each other, frame by frame
addresses   where a rank listens, and why there
dialing     connecting, and going on trying until the deadline
reception   a rank's own port: strangers are kept apart, ranks are let in
letters     sealed messages between ranks that know each other
roll        who takes part, and on which host
meeting     how ranks on several hosts meet
"""
