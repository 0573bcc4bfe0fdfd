"""This machine's addresses: which one to listen on, and which one leads to another machine.

The machine's own name is never resolved: many systems map it to 127.0.1.1 in /etc/hosts.
"""

import ipaddress
import socket

import psutil

from potluck.errors import BadInput

# addresses reserved for documentation: a route to them is the default route; connecting UDP sends nothing
_ANYWHERE = ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1"))
_DISCARD_PORT = 9


def listening_address(asked: str | None) -> str:
    """The address a coordinator listens on.

    ``asked``, if this machine has it; otherwise the address of the interface with the default route, IPv4 before
    IPv6; otherwise the only address that is not loopback.

    Raises:
        BadInput: this machine does not have ``asked``, or has several addresses and no default route, or none.
    """
    addresses = _addresses()
    if asked is not None:
        if _same(asked) not in addresses:
            raise BadInput(f"--address {asked} is no address of this machine, which has {_listed(addresses)}.")
        return _same(asked)
    for family, anywhere in _ANYWHERE:
        found = _routed(family, anywhere)
        if found in addresses and not ipaddress.ip_address(found).is_loopback:
            return found
    outside = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if len(outside) == 1:
        return outside[0]
    if not outside:
        raise BadInput(
            f"This machine is on no network: it has only {_listed(addresses)}. Connect it, or name an address with "
            "--address."
        )
    raise BadInput(
        f"This machine has several addresses and no default route: name the one the other devices can reach with "
        f"--address: {_listed({address: addresses[address] for address in outside})}."
    )


def address_towards(host: str) -> str:
    """The local address from which packets to ``host`` leave.

    Raises:
        BadInput: there is no route to ``host``, or it cannot be resolved.
    """
    try:
        candidates = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        raise BadInput(f"{host} is no address, and no name that can be resolved.") from None
    for family, *_, target in candidates:
        found = _routed(socket.AddressFamily(family), str(target[0]))
        if found is not None:
            return found
    raise BadInput(
        f"There is no route from this machine to {host}; its addresses are {_listed(_addresses())}. "
        "Connect both to one network."
    )


def interface_of(address: str) -> str:
    """The interface that has ``address``, such as ``eth0``.

    Raises:
        BadInput: this machine does not have the address.
    """
    addresses = _addresses()
    if _same(address) not in addresses:
        raise BadInput(f"{address} is no address of this machine, which has {_listed(addresses)}.")
    return addresses[_same(address)]


def https_url(host: str, port: int) -> str:
    """The URL of a server at a numeric address."""
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _addresses() -> dict[str, str]:
    """Interface by address; IPv6 link-local ones, which mean nothing without an interface, are left out."""
    found: dict[str, str] = {}
    for interface, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                address = ipaddress.ip_address(entry.address)
                if not (address.version == 6 and address.is_link_local):
                    found.setdefault(str(address), interface)
    return found


def _routed(family: socket.AddressFamily, target: str) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, _DISCARD_PORT))
            return str(ipaddress.ip_address(probe.getsockname()[0]))
    except OSError:
        return None


def _same(address: str) -> str:
    """The one spelling of an address."""
    try:
        return str(ipaddress.ip_address(address.strip("[] ")))
    except ValueError:
        raise BadInput(f"{address!r} is no IPv4 or IPv6 address.") from None


def _listed(addresses: dict[str, str]) -> str:
    return ", ".join(f"{address} ({interface})" for address, interface in addresses.items()) or "none"
