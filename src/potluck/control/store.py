"""A ``dist.Store`` over the front door: how the devices of a generation find each other without a port of its own.

Gloo calls ``set``, ``get`` and ``wait``; the rest is what else the interface promises and Python can answer.
"""

from collections.abc import Sequence
from datetime import timedelta
from time import monotonic

from torch.distributed import Store  # type: ignore[attr-defined]

from potluck.control.client import Client
from potluck.errors import DeviceLost


class ControlStore(Store):
    """The keys and values of one generation; every method raises what :class:`Client` raises."""

    def __init__(self, client: Client, generation: int, *, timeout_s: float = 60.0) -> None:
        super().__init__()
        self._client = client
        self._generation = generation
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._client.store_set(self._generation, key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value, when it is there.

        Raises:
            DeviceLost: it did not come within the timeout.
        """
        return self._get(key, self._timeout_s)

    def add(self, key: str, value: int) -> int:
        """Add to a number, absent ones being 0; what it is now."""
        return self._client.store_add(self._generation, key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return all(self._client.store_get(self._generation, key) is not None for key in keys)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Store the desired value where the present one is as expected; the value after that."""
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        return self._client.store_compare_set(self._generation, key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Forget a value; whether there was one."""
        return self._client.store_delete(self._generation, key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there.

        Raises:
            DeviceLost: they did not come within the timeout.
        """
        deadline = monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        for key in keys:
            self._get(key, max(0.0, deadline - monotonic()))

    def set_timeout(self, timeout: timedelta) -> None:
        """How long ``get`` and ``wait`` wait."""
        self._timeout_s = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        """``append``, ``multi_get`` and ``multi_set`` are not offered."""
        return False

    def _get(self, key: str, wait_s: float) -> bytes:
        value = self._client.store_get(self._generation, key, wait_s)
        if value is None:
            raise DeviceLost(f"Another device ended, or did not answer within {wait_s:.0f} s (no {key} in the store).")
        return value


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
