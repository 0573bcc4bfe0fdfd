"""The adapter on its way from the server to a client."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from potluck.errors import BadInput, DeviceLost, PotluckError, from_outside
from potluck.job import JOB_FILE, Job, dump_job
from potluck.job_sections import Format
from potluck.models.adapter import CONFIG_FILE, TEMPLATE_FILE, WEIGHTS_FILE
from potluck.models.save import replace_directory
from potluck.split.listener import SplitListener
from potluck.split.terms import QUALITY_FILE, Terms, parse_terms
from potluck.split.uplink import Uplink

_ASK_EVERY_S = 2.0
_FILES = {WEIGHTS_FILE, CONFIG_FILE, TEMPLATE_FILE, QUALITY_FILE}


def wait_for_result(uplink: Uplink, listener: SplitListener, *, contribution: str = "", but: str = "") -> None:
    """Ask until the server has trained.

    Args:
        uplink: to the server.
        listener: told that it takes time.
        contribution: the id of one that must have been trained on; empty if any training is enough.
        but: a state that is not enough, that of an earlier training.

    Raises:
        DeviceLost: the server does not answer any more.
    """
    told = False
    while True:
        result = uplink.result()
        if result is not None and result["state"] != but:
            if not contribution or contribution in _trained_on(uplink):
                return
            but = str(result["state"])
        if not told:
            listener.tell("Waiting until the server has trained; Ctrl-C leaves, and 'potluck fetch' gets it later.")
            told = True
        time.sleep(_ASK_EVERY_S)


def fetch_adapter(
    uplink: Uplink,
    output: Path,
    model: str | None,
    *,
    overwrite: bool = False,
    tell: Callable[[str], None],
    format: Format = "auto",
) -> None:
    """Put the server's adapter into a directory, whole or not at all, with a job that says how to write prompts.

    Args:
        uplink: to the server.
        output: the directory.
        model: the whole model on this machine, to be named as the adapter's base; else the server's name for it stays.
        overwrite: replace what is there.
        tell: told what the adapter needs to be used.
        format: of the examples, if it is known here.

    Raises:
        BadInput: nothing was trained yet, or the output may not be written.
        PotluckError: the server replaced it meanwhile, or what it sends is no adapter.
        SaveFailed: the disk is full.
    """
    result = uplink.result()
    if result is None:
        raise BadInput("The server has not trained yet: try again later, or wait with 'potluck contribute --wait'.")
    with replace_directory(output, overwrite) as directory:
        for name in sorted(_FILES & {str(file["name"]) for file in result["files"]}):
            with (directory / name).open("wb") as handle:
                for chunk in uplink.fetch_result(name):
                    handle.write(chunk)
        base = _name_base(directory / CONFIG_FILE, model)
        job = _job(parse_terms(uplink.terms), base, output, format)
        (directory / JOB_FILE).write_text(dump_job(job), encoding="utf-8")
    tell(f"The adapter lies in {output}.")
    tell(_needs(uplink, base))


def _name_base(path: Path, model: str | None) -> str:
    """Give an adapter's configuration the name of its base model on this machine, and say which it is."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if model is not None:
            config["base_model_name_or_path"] = str(Path(model).absolute()) if Path(model).exists() else model
            path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return str(config["base_model_name_or_path"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        raise PotluckError(f"What the server sends is no adapter: its {CONFIG_FILE} names no base model.") from None


def _job(terms: Terms, base: str, output: Path, format: Format) -> Job:
    """What was trained, as far as it is known here."""
    known = {} if format == "auto" else {"format": format}
    data = terms.data.model_copy(update={"train": [], "eval": [], **known})  # no paths of the server's choice
    return Job(
        model=base,
        data=data,
        output=output.absolute(),
        split=terms.split,
        train=terms.train,
        lora=terms.lora,
        ia3=terms.ia3,
        seed=terms.seed,
    )


def _trained_on(uplink: Uplink) -> set[str]:
    """The ids of the contributions that the server's adapter was made from."""
    try:
        quality: Any = json.loads(b"".join(uplink.fetch_result(QUALITY_FILE)))
        return {str(each) for each in quality["contributions"]}
    except DeviceLost:
        raise
    except (PotluckError, ValueError, KeyError, TypeError):
        return set()  # it is being replaced


def _needs(uplink: Uplink, base: str) -> str:
    """What it takes to use the adapter, and whether this machine has it."""
    files = uplink.model_files()
    weights_mib = sum(int(file["size"]) for file in files if str(file["name"]).endswith(".safetensors")) >> 20
    free_mib = psutil.virtual_memory().available >> 20
    needs = f"To use it, a machine needs the whole model {from_outside(base)}: {weights_mib:,} MiB of weights"
    if free_mib < weights_mib:
        return f"{needs}. This machine has {free_mib:,} MiB free, which is too little: use the adapter on another one."
    return f"{needs}; this machine has {free_mib:,} MiB free."
