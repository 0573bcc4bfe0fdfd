"""A network of namespaces: one a device, and one with the bridge that joins them and leads nowhere else."""

import ipaddress
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from potluck.errors import BadInput, PotluckError
from potluck.testbed.enter import NAMESPACES

_BRIDGE = "switch0"
_INTERFACE = "eth0"
_BURST_S = 0.0001
_SMALLEST_BURST = 68 * 1024  # holds the kernel's largest packet; smaller packets cost the compute beside them more
_QUEUE_MS = 50

Network = ipaddress.IPv4Network
_BLOCK = Network("10.0.0.0/8")
_PREFERRED = ipaddress.IPv4Address("10.77.0.0")


def device_namespace(prefix: str, device: str) -> str:
    """Name of a device's namespace."""
    return f"{prefix}-{device}"


def switch_namespace(prefix: str) -> str:
    """Name of the bridge's namespace; no device can be called so."""
    return f"{prefix}.switch"


def check_tools() -> None:
    """Refuse a machine without iproute2.

    Raises:
        BadInput: ``ip`` or ``tc`` is missing.
    """
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise BadInput(
            f"A testbed needs {' and '.join(missing)}, missing here: install iproute2 (on Debian or Ubuntu: "
            "sudo apt-get install iproute2)."
        )


def free_network() -> Network:
    """A /24 of 10.0.0.0/8 that overlaps no route and no address of this machine.

    Raises:
        PotluckError: there is none.
    """
    routes = json.loads(_call("ip", "-j", "-4", "route", "show", "table", "all") or "[]")
    addresses = json.loads(_call("ip", "-j", "-4", "addr", "show") or "[]")
    used = [_network(route["dst"]) for route in routes if route["dst"] != "default"]
    for interface in addresses:
        used += [_network(f"{each['local']}/{each['prefixlen']}") for each in interface.get("addr_info", ())]
    return choose_network(used)


def choose_network(used: Iterable[Network]) -> Network:
    """The first /24 from 10.77.0.0 on, and then of 10.0.0.0/8, that overlaps none of ``used``.

    Raises:
        PotluckError: there is none.
    """
    taken = [network for network in used if network.prefixlen > 0]
    for address, end in ((_PREFERRED, _BLOCK.broadcast_address), (_BLOCK.network_address, _PREFERRED)):
        while address < end:
            candidate = Network((address, 24))
            blocking = next((network for network in taken if candidate.overlaps(network)), None)
            if blocking is None:
                return candidate
            address = max(candidate.broadcast_address, blocking.broadcast_address) + 1
    raise PotluckError("All of 10.0.0.0/8 is routed on this machine: there are no addresses for a testbed.")


def _network(text: str) -> Network:
    return Network(text, strict=False)


def make_switch(prefix: str) -> None:
    """Make the namespace with the bridge.

    Raises:
        PotluckError: the kernel refused a part.
    """
    namespace = switch_namespace(prefix)
    _call("ip", "netns", "add", namespace)
    _call("ip", "-n", namespace, "link", "set", "lo", "up")
    _call("ip", "-n", namespace, "link", "add", _BRIDGE, "type", "bridge", "forward_delay", "0", "stp_state", "0")
    _call("ip", "-n", namespace, "link", "set", _BRIDGE, "up")


def make_device(prefix: str, device: str, rank: int, network: Network, bits_per_s: int) -> tuple[str, str]:
    """Make a device's namespace and join it to the bridge; its namespace's name and its address.

    Raises:
        PotluckError: the kernel refused a part.
    """
    namespace, switch = device_namespace(prefix, device), switch_namespace(prefix)
    port, address = f"port{rank}", str(network[rank + 1])
    _call("ip", "netns", "add", namespace)
    _call("ip", "-n", namespace, "link", "set", "lo", "up")
    _call("ip", "-n", namespace, "link", "add", _INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
    _call("ip", "-n", switch, "link", "set", port, "master", _BRIDGE)
    for where, interface in ((namespace, _INTERFACE), (switch, port)):
        _limit_rate(where, interface, bits_per_s)
        _call("ip", "-n", where, "link", "set", interface, "up")
    _call("ip", "-n", namespace, "addr", "add", f"{address}/{network.prefixlen}", "dev", _INTERFACE)
    return namespace, address


def _limit_rate(namespace: str, interface: str, bits_per_s: int) -> None:
    burst = max(_SMALLEST_BURST, int(bits_per_s / 8 * _BURST_S))
    limit = ("rate", f"{bits_per_s}bit", "burst", f"{burst}b", "latency", f"{_QUEUE_MS}ms")
    _call("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *limit)


def found(prefix: str) -> list[str]:
    """Namespaces of this prefix, whoever made them."""
    if not NAMESPACES.is_dir():
        return []
    starts = (device_namespace(prefix, ""), switch_namespace(prefix))
    return sorted(path.name for path in NAMESPACES.iterdir() if path.name.startswith(starts))


def processes(namespace: str) -> list[int]:
    """Ids of the processes in a network namespace."""
    wanted = _identity(NAMESPACES / namespace)
    every = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid in every if wanted is not None and _identity(Path(f"/proc/{pid}/ns/net")) == wanted]


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def remove(namespace: str) -> None:
    """Remove a namespace and the interfaces in it, also one that was only half made.

    Raises:
        PotluckError: it cannot be removed.
    """
    try:
        _call("ip", "netns", "delete", namespace)
    except PotluckError:
        path = NAMESPACES / namespace
        if os.path.ismount(path):
            raise
        path.unlink(missing_ok=True)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise PotluckError(f"'{' '.join(command)}' failed: {_reason(command, done.stderr)}")
    return done.stdout


def _reason(command: Sequence[str], stderr: str) -> str:
    said = " ".join(stderr.split()) or "it did not say why"
    unknown = any(word in said for word in ("Unknown device type", "not supported", "kind is unknown", "No such file"))
    for word, module in (("tbf", "sch_tbf"), ("bridge", "bridge"), ("veth", "veth")):
        if unknown and word in command:
            return f"{said} The kernel lacks '{word}': try 'modprobe {module}'."
    if "netns" in command and "not permitted" in said:
        return f"{said} This machine (a container?) lets nobody make network namespaces."
    return said
