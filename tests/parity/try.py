import sys, time, tempfile
from pathlib import Path
sys.path.insert(0, "tests/parity")
import pairs, judge
from pair import PAIRS, Said, Refused, Same
from loops import Loops
names = [n for n in PAIRS if any(a in n for a in sys.argv[1:])] if len(sys.argv)>1 else list(PAIRS)
tmp = tempfile.mkdtemp()
loops = Loops(Path(tmp))
for n in names:
    p = PAIRS[n]; t=time.time()
    try:
        ref = loops.plain(p) if not (isinstance(p.expected, Refused) and p.expected.alone) else None
    except AssertionError as e:
        print("PLAIN FAILED", n, e); continue
    t1=time.time()-t
    print(f"== {n} [{p.expected}] plain {t1:.1f}s", "f32 bound", ref and ref.bound, flush=True)
    for w, d, m in [(1,"float64",1),(1,"float64",6),(2,"float64",6),(3,"float64",6),(3,"float32",6)]:
        t=time.time()
        o = loops.run(p, ref, w, d, micro_batches=m)
        print(f"  {w} {d} {m}: {time.time()-t:.1f}s {o.distance} {o.verdict} {o.error[-300:]}", flush=True)
        for c in judge.complaints(p,o): print("     !", c[-400:])
loops.close()
