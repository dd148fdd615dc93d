"""Lifelines at their busiest, for the race detector: `make sanitize` runs it.

Not a test by itself: what it shows, ThreadSanitizer says.
"""

import sys
import threading

from stars import Star, until

ROUNDS = 20
WORDS = 200


def tell(star, rank):
    for word in range(WORDS):
        star[rank].announce_failure(rank, word)
        star[rank].silence()
        if word % 10 == 0:
            star.take(rank)


def together(star, ranks, work):
    threads = [threading.Thread(target=work, args=(star, rank)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def close(star, rank):
    star[rank].announce_dead(0, "gone")
    star[rank].close()
    star[rank].announce_failure(1, 1)


for n in (2, 5):
    for _ in range(ROUNDS):
        with Star(n, beat_ms=1) as star:
            together(star, range(n), tell)
            for rank in range(n):
                until(lambda r=rank, s=star: len(s.take(r)) == (s.n - 1) * WORDS)
            together(star, range(n), close)
sys.stdout.write("no races seen\n")
