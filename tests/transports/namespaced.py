"""A rank, or a client without the secret, in a network namespace: for test_namespaces.

Arguments as JSON; what was found as JSON on the last line.
"""

import json
import sys
import time

import pending_clients

from unisono.errors import UnisonoError
from unisono.transports.addresses import Address
from unisono.transports.handshake import data_purpose
from unisono.transports.rendezvous_hosts import rendezvous
from unisono.transports.secret import Secret


def rank(number, n, where, secret, interface):
    known = Secret(bytes.fromhex(secret)) if secret else None
    table = rendezvous(
        *(number, n, "job", where),
        secret=known,
        version="1",
        timeout_s=30,
        interface=interface,
    )
    for one in range(n):
        for two in range(one):
            if number == one:
                table.listener.connect(two, data_purpose(1), 20).close()
            elif number == two:
                table.listener.expect(one, data_purpose(1), 20).close()
    found = {"hosts": table.hosts, "why": table.why}
    found["addresses"] = [entry.address for entry in table.entries]
    found["turned_away"] = table.listener.rejected
    # Rank 0 ends last, since other clients connect to its port.
    if number > 0:
        table.lifelines[0].socket.recv(1)
    else:
        time.sleep(0.2)
    table.close()
    return found


def intruder(where):
    address, until = Address.parse(where), time.monotonic() + 60
    said = b""
    for number in range(64):
        try:
            with pending_clients.connect(address) as sock:
                kinds = pending_clients.TALKATIVE
                kinds[number % len(kinds)](sock)
                said += pending_clients.everything_said_to(sock)
        except OSError:
            if number or time.monotonic() > until:
                break
            time.sleep(0.05)
    return {"said": len(said), "tried": number}


if __name__ == "__main__":
    what, *rest = json.loads(sys.argv[1])
    try:
        end = {"rank": rank, "intruder": intruder}[what](*rest)
    except UnisonoError as error:
        end = {"error": type(error).__name__, "message": str(error)}
    sys.stdout.write(json.dumps(end) + "\n")
