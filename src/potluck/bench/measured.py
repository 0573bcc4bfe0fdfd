"""What the processes of a comparison hand each other on disk, and their memory."""

from pathlib import Path

ADAPTER = "adapter"
SUMMARY_FILE = "summary.json"


def peak_rss_mib(process: int | str = "self") -> float:
    """The most memory a process held so far, in MiB: VmHWM, since ``ru_maxrss`` begins with the parent's.

    Raises:
        OSError: there is no such process, or no /proc.
    """
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
