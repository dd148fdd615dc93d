"""`unisono studio`: the explainer with choices, in this machine's own browser."""

from __future__ import annotations

import webbrowser
from typing import Annotated

from cyclopts import Parameter

from unisono.cli._studio_search import ANSWERS
from unisono.cli.output import print_json
from unisono.view.studio import Studio


def studio(
    *,
    port: int = 0,
    open_: Annotated[bool, Parameter(name="--open")] = False,
    json: bool = False,
) -> int:
    """Serve the explainer on loopback: algorithms, costs, links, trees, strategies.

    Besides, it searches for plans, compares predictions with published results and
    shows traces. It ends with Ctrl-C. Only this machine can reach it.

    Example: unisono studio --open

    Parameters
    ----------
    port
        Where to listen, on 127.0.0.1; 0 is any port that is free.
    open_
        Open it in the default browser.
    json
        Print the address as one JSON object.
    """
    with Studio(port, ANSWERS) as server:
        if json:
            print_json({"address": server.address})
        else:
            print(f"studio: {server.address} (Ctrl-C ends it)", flush=True)
        if open_:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
