"""Devices that are small programs, which speak the devices' language."""

import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

PRELUDE = """
import json, os, signal, sys, threading, time
spec = json.loads(sys.stdin.readline())
rank = spec["rank"]
def tell(event, **fields):
    print(json.dumps({"event": event, "rank": rank, **fields}), flush=True)
def end_with_parent():
    while os.read(0, 1):
        pass
    os._exit(0)
threading.Thread(target=end_with_parent, daemon=True).start()
"""


def device(tmp_path: Path, body: str) -> list[str]:
    script = tmp_path / "device.py"
    script.write_text(PRELUDE + textwrap.dedent(body))
    return [sys.executable, "-S", str(script)]


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def ended(pids: Sequence[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
