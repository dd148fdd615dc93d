"""What the tests of traces share: a trace as tables that answer SQL."""

import sqlite3

import pytest

TABLES = """
create table slice (ts real, dur real, pid int, tid int, name text, cat text);
create table flow (id int, ph text, pid int, tid int, ts real);
create table counter (ts real, pid int, name text, value real);
create table thread (pid int, tid int, name text);
"""


@pytest.fixture
def tables():
    """The tables that Perfetto's trace processor would make, in SQLite."""

    def load(doc):
        base = sqlite3.connect(":memory:")
        base.executescript(TABLES)
        for e in doc["traceEvents"]:
            if e["ph"] == "X":
                row = e["ts"], e["dur"], e["pid"], e["tid"], e["name"], e["cat"]
                base.execute("insert into slice values (?,?,?,?,?,?)", row)
            elif e["ph"] in "sf":
                row = e["id"], e["ph"], e["pid"], e["tid"], e["ts"]
                base.execute("insert into flow values (?,?,?,?,?)", row)
            elif e["ph"] == "C":
                row = e["ts"], e["pid"], e["name"], e["args"]["bytes"]
                base.execute("insert into counter values (?,?,?,?)", row)
            elif e["name"] == "thread_name":
                row = e["pid"], e["tid"], e["args"]["name"]
                base.execute("insert into thread values (?,?,?)", row)
        return lambda query, *values: base.execute(query, values).fetchall()

    return load
