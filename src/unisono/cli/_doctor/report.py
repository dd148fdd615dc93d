"""Findings as lines that begin with OK or FIX, and matrices as small tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unisono.cli._doctor.host import Finding
from unisono.cli._doctor.rank import WorldFindings
from unisono.cli.output import print_row, print_text

_CLOCKS_APART_S = 0.5


_APART = (
    "open the ports between the hosts in the firewall; if they have several networks, "
    "name the one to use: UNISONO_INTERFACE=eth0 unisono doctor --hosts ..."
)
_TOGETHER = "unisono env, and report what it prints"


def of_world(found: WorldFindings, *, several: bool) -> list[Finding]:
    """What a world has found, as lines."""
    if found.failed:
        fix = _APART if several else _TOGETHER
        return [Finding("world", False, found.failed, fix)]
    ranks = len(found.hosts)
    hosts = len(set(found.hosts))
    detail = f"{ranks} ranks connected, {hosts} host{'s' if hosts > 1 else ''}"
    lines = [Finding("world", True, detail)]
    wrong = {name: count for name, count in found.wrong.items() if count}
    if wrong:
        detail = "; ".join(f"{name}: {count} wrong" for name, count in wrong.items())
        fix = "take this host out and test its memory; please report it: unisono env"
        lines.append(Finding("answers", False, detail, fix))
    else:
        detail = f"{len(found.wrong)} collectives, every element equal to NumPy's"
        lines.append(Finding("answers", True, detail))
    for host, offset in found.offsets_s.items():
        detail = f"{offset * 1e3:+.3f} ms from rank 0's"
        ok = abs(offset) < _CLOCKS_APART_S
        fix = "sudo timedatectl set-ntp true"
        lines.append(Finding("clock", ok, detail, fix, where=host))
    return lines


def show(findings: Iterable[Finding]) -> None:
    """One line each; below a problem, the command that fixes it."""
    for finding in findings:
        where = f"{finding.where}: " if finding.where else ""
        detail = " ".join(finding.detail.split())
        print_text(
            f"{'OK ' if finding.ok else 'FIX'}  {finding.what:<14} {where}{detail}"
        )
        if not finding.ok and finding.fix:
            print_text(f"       run: {finding.fix}")


def show_matrices(found: WorldFindings) -> None:
    """Latency and bandwidth between every two ranks that were measured."""
    if len(found.measured) < 2:
        return
    print()
    print("latency of 8 bytes, one way (µs)")
    _show_matrix(found.measured, found.latency_us)
    print()
    print("bandwidth of 4 MiB, one way (GB/s)")
    _show_matrix(found.measured, found.bandwidth_gbs)


def _show_matrix(ranks: Sequence[int], rows: Sequence[Sequence[float | None]]) -> None:
    widths = [4, *[-6] * len(ranks)]
    print_row(["rank", *map(str, ranks)], widths)
    for rank, row in zip(ranks, rows, strict=True):
        cells = ("-" if value is None else f"{value:.3g}" for value in row)
        print_row([f"{rank:>4}", *cells], widths)
