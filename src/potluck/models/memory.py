"""A device's memory: what it is, and giving back what is free."""

import ctypes
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # malloc.h


def memory_mib(field: str, process: int | str = "self") -> float:
    """A process's ``VmRSS`` (resident now) or ``VmHWM`` (at most so far); 0 where /proc does not tell.

    ``ru_maxrss`` is not used: a child inherits its parent's through fork.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(lines[field].split()[0]) / 1024 if field in lines else 0.0


def free_at_once() -> None:
    """Have glibc give memory of freed activations back to the system instead of keeping it in a heap full of holes.

    Its own threshold grows to 32 MiB, and each half-batch's tensors, of sizes that change with every batch, then
    leave holes between the next ones: 100 MiB and more on a small model. Elsewhere than on glibc nothing is done.
    """
    if (glibc := _glibc()) is not None:
        glibc.mallopt(_M_MMAP_THRESHOLD, 384 << 10)


def trim() -> None:
    """Give back what is free now: after a large tokenizer, or a checkpoint's parts, have come and gone."""
    if (glibc := _glibc()) is not None:
        glibc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
