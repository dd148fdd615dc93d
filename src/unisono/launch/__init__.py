"""Starting ranks: `unisono run`, `unisono.spawn`.

local        processes of this host
remote       processes of several hosts, an agent on each
ssh          the connection to an agent
agent        `python -m unisono.launch.agent`, the launcher's part on another host
protocol     what launcher and agent send each other
supervisor   the loop that local and remote share: signals, grace, the end
processes    process groups, and the reaper that ends them
output       what ranks print, in whole lines; screen: labels, bars, tracebacks
environment  the variables of ranks, torchrun's included
binding      cores of ranks; limits, memory_kills: what the host allows and did
restarts     a failed job, started again
outcome      which rank failed first, and the exit code
hostfile     hosts as people write them
spawn        a function as n processes; exceptions: errors carried between processes
"""
