#!/usr/bin/env bash
# torch 2.13.0, gloo: all_to_all_single between two hosts uses their link mostly one way at a time.
# Needs root and iproute2: two network namespaces with a link of 100 Mbit/s each way stand for the hosts.
#
# Guessed: each rank sends and receives at once, so 2 MB each way take as long as 2 MB one way (168 ms on the
# wire), as a receive and a send that are posted in this order do.
# Seen: those take 177 to 194 ms; the all-to-all of the same bytes 178 to 355 ms, in the mean 1.35 times as long. Where a
# rank has begun to send before it says that it can receive, that word waits behind what it sends.
set -euo pipefail
folder=$(mktemp -d)
one="a2a-$$-one" two="a2a-$$-two"
clean() {
  ip netns del "$one" 2>/dev/null || true
  ip netns del "$two" 2>/dev/null || true
  rm -rf "$folder"
}
trap clean EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/rank.py" <<'PY'
import statistics
import sys
import time

import torch
import torch.distributed as dist

rank, size = int(sys.argv[1]), 2_100_000
dist.init_process_group("gloo", init_method="tcp://10.77.0.1:29511", rank=rank, world_size=2)
out, parts = torch.zeros(2 * size, dtype=torch.uint8), torch.ones(2 * size, dtype=torch.uint8)
mine, theirs = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)


def by_hand():
    works = dist.irecv(theirs, 1 - rank), dist.isend(mine, 1 - rank)
    for work in works:
        work.wait()


def seconds(call):
    dist.barrier()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


times = {"all_to_all_single": [], "irecv and isend": []}
for _ in range(12):
    times["all_to_all_single"].append(seconds(lambda: dist.all_to_all_single(out, parts)))
    times["irecv and isend"].append(seconds(by_hand))
assert out.min() == 1 == theirs.min()
if rank == 0:
    print(f"torch {torch.__version__.partition('+')[0]}, 2.1 MB each way at 100 Mbit/s:")
    for name, each in times.items():
        print(f"{name}: {1e3 * min(each):.0f} to {1e3 * max(each):.0f} ms, mean {1e3 * statistics.mean(each):.0f}")
    ratio = statistics.mean(times["all_to_all_single"]) / statistics.mean(times["irecv and isend"])
    print(f"the all-to-all takes {ratio:.2f} times as long")
    assert ratio > 1.15, "the behaviour has changed"
dist.barrier()
PY
ip netns add "$one"
ip netns add "$two"
ip -n "$one" link add eth0 type veth peer name eth0 netns "$two"
for end in "$one 1" "$two 2"; do
  read -r space number <<< "$end"
  ip -n "$space" address add "10.77.0.$number/24" dev eth0
  ip -n "$space" link set lo up
  ip -n "$space" link set eth0 up
  ip netns exec "$space" tc qdisc add dev eth0 root tbf rate 100mbit burst 25000 latency 50ms
done
export GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
ip netns exec "$two" "$folder/venv/bin/python" "$folder/rank.py" 1 2> "$folder/log" &
ip netns exec "$one" "$folder/venv/bin/python" "$folder/rank.py" 0 2>> "$folder/log" || { cat "$folder/log"; exit 1; }
wait
