"""Which all_reduce for 16 hosts of eight GPUs, and what one late rank costs."""

from unisono.simulate import compare, simulate
from unisono.topology import parse

cluster = parse("dgx-h100:16")
sizes = [1 << 10, 1 << 20, 1 << 30]
names = ["ring", "recursive_doubling", "hierarchical"]
compared = compare("all_reduce", names, cluster, sizes)
for at, size in enumerate(sizes):
    best = compared.ranking(at)[0]
    print(f"{size:>10} B: {best.algorithm}, {best.time * 1e6:.0f} us")
for cross in compared.crossovers():
    print(f"from {cross.nbytes:.0f} B on {cross.winner}")

print(simulate("ring", "dgx-h100:1", "256M"))
late = simulate("ring", "dgx-h100:1", "256M", delays={3: 1e-3})
print(f"with rank 3 a millisecond late: {late.time * 1e3:.2f} ms")
