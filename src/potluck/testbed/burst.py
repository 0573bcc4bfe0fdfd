"""What a device does to be calibrated: the burst pattern of a job, paced; a program of its own.

It writes ``ready``, waits for a line, and then writes its measurement as JSON. A burst is a run of small matrix
products, as the pieces between two messages of a job are.
"""

import argparse
import json
import sys
import time

import torch

from potluck.chain.pace import Pace, come_first

_WIDTH = 128
_WARM_UP_S = 0.3


def replay(pace: Pace, burst_s: float, seconds: float) -> tuple[float, float, int]:
    """CPU seconds, wall seconds and number of bursts; each burst takes ``burst_s`` of this thread's CPU time."""
    a, b, out = torch.randn(_WIDTH, _WIDTH), torch.randn(_WIDTH, _WIDTH), torch.empty(_WIDTH, _WIDTH)
    bursts = 0
    pace.restart()
    start_s, start_cpu_s = time.perf_counter(), time.thread_time()
    while (wall_s := time.perf_counter() - start_s) < seconds:
        burst_end_s = time.thread_time() + burst_s
        while time.thread_time() < burst_end_s:
            torch.mm(a, b, out=out)
        pace.catch_up()
        bursts += 1
    return time.thread_time() - start_cpu_s, wall_s, bursts


def main() -> None:
    """Measure once, when told to begin."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--speed", type=float, required=True)
    parser.add_argument("--burst-ms", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    replay(Pace(options.speed), options.burst_ms / 1000, _WARM_UP_S)
    come_first()
    print("ready", flush=True)
    sys.stdin.readline()
    cpu_s, wall_s, bursts = replay(Pace(options.speed), options.burst_ms / 1000, options.seconds)
    print(json.dumps({"cpu_s": cpu_s, "wall_s": wall_s, "bursts": bursts}), flush=True)


if __name__ == "__main__":
    main()
