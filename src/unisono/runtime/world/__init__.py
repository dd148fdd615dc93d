"""The world: how it is made, and how it changes.

init             `unisono.init`
environment      rank and size, from the launcher's variables
address          where rank 0 listens
membership       what a world needs to be followed by another
agreement        the rules by which survivors agree on who is left
shrink           `comm.shrink`; shrink_protocol: the rules carried out over sockets
grow             `comm.grow` and `unisono.init(join=True)`
"""
