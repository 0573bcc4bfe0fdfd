"""``potluck`` whose devices are recorded: DIRECTORY VERSION ARGUMENT...; what it posts is written down as well."""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from potluck.cli import main
from potluck.control import client
from potluck.pool import crew, join
from potluck.pool.launch import run_devices

directory, version, *arguments = sys.argv[1:]
command = [sys.executable, str(Path(__file__).with_name("recorded_device.py")), directory]


class RecordedClient(client.Client):
    def post(self, events: Sequence[Mapping[str, Any]]) -> None:
        with (Path(directory) / "posted.jsonl").open("a") as file:
            file.writelines(json.dumps(dict(event)) + "\n" for event in events)
        super().post(events)


crew.run_devices = partial(run_devices, command=command)  # type: ignore[assignment]
join.run_devices = partial(run_devices, command=command)  # type: ignore[assignment]
join.Client = RecordedClient  # type: ignore[misc]
if version != "-":
    client.versions = lambda: {"potluck": version, "torch": version, "transformers": version}  # type: ignore[assignment]
sys.argv = ["potluck", *arguments]
main()
