"""What others have measured and published, and how far the simulator is from it.

    .venv/bin/python -m benchmarks.published          the table of errors (make truth)
    .venv/bin/python -m benchmarks.published write    and into docs/published.md

collectives.csv, training.csv   the rows, as they were published
sources.toml                    where each is from, and what it was measured on
tables                          reads them, and splits them into two halves
fitting                         constants from one half
judging                         errors on the other half

Constants are fitted on every second row of a source and judged on the others: of a
collective every second size, of a table of training steps every second line.
"""
