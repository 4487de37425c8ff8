"""Compare the time of `compress` with that of an older version, on six real networks.

    python benchmarks/versions.py OLDER_CHECKOUT [--networks resnet-56,dncnn,…] [--minutes 20] [--threads 1]

Every network is compressed to 70 % of its MACs by both versions, one after the other, each in a process of its own,
with an empty cache. Times are seconds of the CPU without loading and analysing the network. A version that has no
result after so many minutes of CPU time is stopped.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from six_networks import NETWORKS

HERE = Path(__file__).resolve().parent


def compress(name: str) -> None:
    """Compress one network with the version that is imported, and print the seconds."""
    import neuron_merging as nm

    analysis = nm.analyse(*(part for part in NETWORKS[name]() if part is not None))
    start = time.process_time()
    small = nm.compress(analysis, budget={"macs": 0.7})
    assert small is not None
    print(time.process_time() - start)


def measure(name: str, checkout: Path, minutes: float, threads: int) -> float | str:
    """Compress one network with the version in a checkout; return the seconds, or what went wrong."""
    paths = [str(checkout / "src"), str(HERE)]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "NEURON_MERGING_CACHE": "", "OMP_NUM_THREADS": str(threads)}

    def limit_time() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(minutes * 60), int(minutes * 60) + 5))

    run = subprocess.run(
        [sys.executable, __file__, "--compress", name],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        preexec_fn=limit_time,
    )
    if run.returncode < 0:
        return f"no result after {minutes:g} minutes of CPU time"
    return float(run.stdout.split()[-1]) if run.returncode == 0 else run.stderr.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", nargs="?", type=Path)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compress", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compress:
        return compress(arguments.compress)
    if arguments.older is None:
        parser.error("name the folder of an older checkout")
    for name in arguments.networks.split(","):
        new, old = (
            measure(name, checkout, arguments.minutes, arguments.threads)
            for checkout in (HERE.parent, arguments.older.resolve())
        )
        least, known = (old, "") if isinstance(old, float) else (arguments.minutes * 60, "more than ")
        ratio = f"{known}{least / new:.1f} times" if isinstance(new, float) else ""
        shown = [f"{value:.1f} s" if isinstance(value, float) else value for value in (old, new)]
        print(f"{name}: older {shown[0]}, this version {shown[1]} {ratio}", flush=True)


if __name__ == "__main__":
    main()
