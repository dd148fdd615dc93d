"""HOW bytes move: the interface of transports, and how their ranks connect.

interface         what a transport implements: name, capabilities, connect
registry          transports by name
session           what connect returns: one rank's connection to a world
shm               transport: processes of one host
tcp               transport: processes on several hosts
threads           transport: threads of one process
streams           the wires between ranks of different hosts, by communicator

rendezvous_local  how processes of one host find each other
rendezvous_hosts  how ranks on several hosts find each other
rank_table        which ranks there are, and on which host
endpoints         where ranks of a failed world connect, to shrink
join              how processes join a job that grows

secret            the job's secret, from which all keys are derived
handshake         how two ranks authenticate each other, frame by frame
tls               encryption
addresses         where a rank listens, and why there
connect           connecting to a rank, with retries until the deadline
listener          the port of a rank: pending and authenticated connections
pending           connections that are not authenticated yet
control           control messages between authenticated ranks
deadline, limits, unix    one deadline for a socket; descriptors; Unix sockets
"""
