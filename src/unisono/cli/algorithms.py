"""`unisono algorithms`: what exists, and what it costs for so many ranks."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from unisono.algorithms import LANGUAGES, Advice, Algorithm, library
from unisono.algorithms.registry import Param
from unisono.cli.output import parse_world, print_json, print_row, print_text
from unisono.errors import BadArgument, UnsupportedWorld, unknown
from unisono.schedule.collective import collective as find_collective
from unisono.view.advice import sentences_of, wrapped
from unisono.view.text import WIDTH

Row = dict[str, object]
_WIDTHS = (15, 24, -6, -7, -8, -8, -8, -10, 18)
_FIELDS = (
    *("collective", "algorithm", "n", "steps", "rounds", "span", "work", "memory"),
    "same_bits",
    *("least_rounds", "least_span", "least_work", "verified_transfers", "unsupported"),
)
_NUMBERS = ("steps", "rounds", "span", "work", "memory")
_HEADS = ("collective", "algorithm", *_NUMBERS, "same bits")


def algorithms(
    collective: str = "",
    /,
    *,
    n: Annotated[str, Parameter(name=["-n", "--ranks"], metavar="N")] = "8",
    verify: bool = False,
    json: bool = False,
    csv_: Annotated[bool, Parameter(name="--csv")] = False,
    lang: str = "en",
) -> int:
    """List every algorithm with its cost for n ranks, beside the lower bound.

    Span is what passes through the busiest rank of each step, and work what it adds up,
    summed over the steps, in buffers. Memory is what a rank holds at most besides its
    input and result. Below the table stands when each is good, and when it is not.

    Example: unisono algorithms all_reduce -n 13

    Parameters
    ----------
    collective
        Only those for this collective.
    n
        Number of ranks.
    verify
        Prove each one right as well.
    json
        Print a JSON list.
    csv_
        Print comma-separated values.
    lang
        The language of the words below the table: en or zh.
    """
    only = find_collective(collective).name if collective else ""
    world = parse_world(n)
    if json and csv_:
        raise BadArgument("choose one of --json and --csv")
    if csv_ and lang != LANGUAGES[0]:
        raise BadArgument("--csv has no words, so leave out --lang; --json has them")
    if world < 1:
        raise BadArgument(f"-n {n}: a world has at least one rank")
    chosen = [a for (c, _), a in library().items() if only in ("", c)]
    words = {a.name: a.advice for a in chosen if a.advice is not None}
    if lang not in LANGUAGES:
        raise unknown("language", lang, LANGUAGES)
    rows = (_row(a, v, world, lang, verify=verify) for a in chosen for v in a.variants)
    if json:
        print_json(list(rows))
    elif csv_:
        _print_csv(rows)
    else:
        _print_table(rows, world, verify=verify)
        _print_words(words, lang)
    return 0


def _row(
    algorithm: Algorithm,
    variant: Mapping[str, Param],
    n: int,
    lang: str,
    *,
    verify: bool,
) -> Row:
    row: Row = {
        "collective": algorithm.collective.name,
        "algorithm": algorithm.spelled(**variant),
        "parameters": {**algorithm.params, **variant},
        "about": algorithm.about,
        "n": n,
    }
    if algorithm.advice is not None:
        row["advice"] = asdict(algorithm.advice.words(lang))
    try:
        made = algorithm(n, **variant)
    except UnsupportedWorld as why:
        return row | {"unsupported": str(why)}
    cost = made.cost()
    row |= {
        "steps": cost.steps,
        "rounds": cost.rounds,
        "span": cost.span,
        "work": cost.work,
        "memory": cost.memory,
        "same_bits": made.consistency().same_bits_on_all_ranks,
        "least_rounds": cost.bound.rounds,
        "least_span": cost.bound.span,
        "least_work": cost.bound.work,
    }
    if verify:
        row["verified_transfers"] = made.verify().transfers
    return row


def _print_csv(rows: Iterator[Row]) -> None:
    writer = csv.DictWriter(sys.stdout, _FIELDS, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)


def _print_table(rows: Iterator[Row], n: int, *, verify: bool) -> None:
    """Row by row as they are made, so that the first line comes at once."""
    print_row((*_HEADS, "verified" if verify else ""), _WIDTHS)
    shown, done = "", []
    for row in rows:
        if row["collective"] != shown and "unsupported" not in row:
            shown = str(row["collective"])
            _print_bound(row)
        print_row(_cells(row, verified=verify), _WIDTHS)
        done.append(row.get("verified_transfers"))
    proven = [count for count in done if isinstance(count, int)]
    if verify and len(proven) == len(done):
        checked = f"{sum(proven):,} transfers checked"
        print_text(f"all {len(done)} verified at n = {n}: {checked}")
    elif verify:
        rest = len(done) - len(proven)
        print_text(f"{len(proven)} verified at n = {n}; {rest} have no schedule for it")


def _print_words(words: Mapping[str, Advice], lang: str) -> None:
    """When each algorithm is good and when not: once, whatever its collectives."""
    for name in sorted(words):
        print_text(f"\n{name}")
        for head, text in sentences_of(words[name], lang):
            print_text("\n".join(wrapped(head, text, WIDTH)))


def _print_bound(row: Row) -> None:
    """The line above a collective's algorithms: the least that any needs."""
    bound = {key: row.get(f"least_{key}", "") for key in ("rounds", "span", "work")}
    cells = {"collective": row["collective"], "algorithm": "(least possible)", **bound}
    print_row(_cells(cells, verified=False), _WIDTHS)


def _cells(row: Row, *, verified: bool) -> list[str]:
    if "unsupported" in row:
        return ["", str(row["algorithm"]), *["-"] * 6, "-"]
    head = str(row["collective"]) if row["algorithm"] == "(least possible)" else ""
    numbers = [_number(row.get(key, "")) for key in _NUMBERS]
    same = row.get("same_bits")
    bits = "" if same is None else "yes" if same else "no"
    done = row.get("verified_transfers")
    mark = f"yes, {done:,} transfers" if verified and isinstance(done, int) else ""
    return [head, str(row["algorithm"]), *numbers, bits, mark]


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
