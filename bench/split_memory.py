"""Peak memory of a one-shot client whose model has 1.4B parameters, beyond what its imports take.

python -m bench.split_memory [--cut 2] [--encoding int8] [--rows 200]

The model (24 blocks, hidden 2048, random bfloat16 weights) lies on the client's disk; a real server on this machine
takes the contribution. Text of Python's reference manual, 128 tokens a row at most, all targets.
"""

import argparse
import json
import pydoc_data.topics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.jobs import smollm2
from bench.memory import write_llama

WANTED_MIB, AIMED_AT_MIB = 900.0, 500.0
_IMPORTS = (
    "from potluck.split.client import contribute; from potluck.split import client_model, forward; "
    "from potluck.models.memory import memory_mib; print(memory_mib('VmHWM'))"
)


def main() -> None:
    """Serve, contribute, and compare peaks."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cut", type=int, default=2)
    arguments.add_argument("--encoding", choices=("fp32", "bf16", "int8", "int4"), default="int8")
    arguments.add_argument("--rows", type=int, default=200)
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        model_dir = write_llama(scratch / "model", smollm2())
        texts = [json.dumps({"text": text[:600]}) for text in list(pydoc_data.topics.topics.values()) * 3]
        (scratch / "data.jsonl").write_text("\n".join(texts[: args.rows]) + "\n", encoding="utf-8")
        (scratch / "job.yaml").write_text(
            f"model: {model_dir}\ndata: {{format: text, max_length: 128}}\noutput: {scratch / 'out'}\n"
            f"split: {{cut: {args.cut}, encoding: {args.encoding}}}\n",
            encoding="utf-8",
        )
        imports_mib = float(subprocess.check_output([sys.executable, "-P", "-c", _IMPORTS], text=True))
        with subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "potluck.bench.server",
                scratch / "job.yaml",
                scratch / "home",
                "9",
                scratch / "in",
            ]
        ) as server:
            try:
                while not (scratch / "in").exists():
                    time.sleep(0.2)
                done = contribute(scratch, model_dir)
            finally:
                server.kill()
    beyond_mib = done["peak_rss_mib"] - imports_mib
    row = {
        "cut": args.cut,
        "encoding": args.encoding,
        "target_tokens": done["target_tokens"],
        "peak_rss_mib": round(done["peak_rss_mib"], 1),
        "import_rss_mib": round(imports_mib, 1),
        "beyond_mib": round(beyond_mib, 1),
        "active_s": round(done["active_s"], 1),
        "within": beyond_mib <= WANTED_MIB,
        "within_aim": beyond_mib <= AIMED_AT_MIB,
    }
    print(json.dumps(row))


def contribute(scratch: Path, model_dir: Path) -> dict[str, float]:
    """One client, as a process of its own; what it said."""
    spec = {
        "invite": str(scratch / "in"),
        "data": str(scratch / "data.jsonl"),
        "name": "client",
        "model": str(model_dir),
        "home": str(scratch / "client"),
        "link_mbit": None,
        "send_ids": False,
    }
    said = subprocess.check_output([sys.executable, "-P", "-m", "potluck.bench.client", json.dumps(spec)], text=True)
    return dict(json.loads(said.splitlines()[-1]))


if __name__ == "__main__":
    main()
