"""What one can ask of a schedule, without a single process."""

import unisono
from unisono.schedule import load, save

s = unisono.schedule("all_reduce", "rabenseifner", n=13)

print(s.verify())
cost = s.cost()
print(f"{cost.rounds} rounds, at least {cost.bound.rounds}")
print(f"{cost.span:.3f} buffers by the busiest rank, at least {cost.bound.span:.3f}")
print("same bits on all ranks:", s.consistency().same_bits_on_all_ranks)
print("longest chain of transfers:", s.dependencies().longest_chain())

small = unisono.schedule("broadcast", "tree:radix=3", n=5, root=2)
print(small)

save(small, "/tmp/tree.json")
print(load("/tmp/tree.json").title, "read back and verified")
