"""A stand-in for ssh: `ssh host command` runs the command here, as on another host.

Some hosts are known by their names: `down` cannot be reached, `bare` has no Python, and
so on. Every other one is this machine under another name. What was asked for is kept
in a file, so that tests see what stood on a command line.
"""

import sys

SSH = """#!/bin/sh
while case $1 in -*) true;; *) false;; esac; do shift; done
host=$1; shift
echo "$host $*" >> {log}
case $host in
  down) echo "ssh: connect to host down port 22: No route to host" >&2; exit 255;;
  bare) exec sh -c "exec /no/such/python -m unisono.launch.agent";;
  empty) cd /; PYTHONPATH= exec {python} -I -S -m unisono.launch.agent;;
  old) echo; echo "unisono agent, version 0.0.1"; cat > /dev/null; exit 0;;
  broken) echo "Segmentation fault" >&2; exit 139;;
  noisy) echo "Welcome to noisy!"; echo "do not reply" >&2;;
esac
export UNISONO_HOST_ID=$host
exec sh -c "$*"
"""


def stand_in(folder):
    """The command to name with --ssh, and the file that keeps what it was asked."""
    command, log = folder / "ssh", folder / "ssh.log"
    command.write_text(SSH.format(log=log, python=sys.executable))
    command.chmod(0o755)
    return str(command), log
