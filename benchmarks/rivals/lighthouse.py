"""torchft's lighthouse at an address, until standard input ends; prints where it is."""

import sys

from torchft.coordination import LighthouseServer

address, groups = sys.argv[1], int(sys.argv[2])
lighthouse = LighthouseServer(bind=f"{address}:0", min_replicas=groups, join_timeout_ms=10_000)
print(f"http://{address}:{lighthouse.address().rpartition(':')[2]}", flush=True)
sys.stdin.read()
lighthouse.shutdown()
