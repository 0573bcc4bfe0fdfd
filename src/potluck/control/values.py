"""The keys and values of one generation of devices; a new generation begins with none. Lives in one event loop."""

import asyncio

from potluck.control.requests import Refused

_MOST_KEYS = 100_000


class Values:
    """What a ``dist.Store`` of the present generation holds."""

    def __init__(self) -> None:
        self.generation = 0
        self._values: dict[str, bytes] = {}
        self._answers: dict[str, bytes] = {}
        """Answers by the id of their request, so that a retried one is not done twice."""
        self._changed = asyncio.Event()

    def begin(self) -> int:
        """Start the next generation; who waits for a key of the one before is refused."""
        self.generation += 1
        self._values.clear()
        self._answers.clear()
        self._wake()
        return self.generation

    def set(self, generation: int, key: str, value: bytes) -> None:
        """Store a value.

        Raises:
            Refused: another generation is present, or there are too many keys.
        """
        self._check(generation)
        if key not in self._values and len(self._values) >= _MOST_KEYS:
            raise Refused(413, f"The store holds at most {_MOST_KEYS} keys.")
        self._values[key] = value
        self._wake()

    async def get(self, generation: int, key: str, wait_s: float) -> bytes | None:
        """The value, or None if it is not there within ``wait_s``.

        Raises:
            Refused: another generation is present, or begins meanwhile.
        """
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            self._check(generation)
            if key in self._values:
                return self._values[key]
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return None
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return None

    def add(self, generation: int, key: str, amount: int, request: str) -> int:
        """Add to a number kept as decimal text, absent ones being 0; what it is now.

        Raises:
            Refused: another generation is present, or the value is no number.
        """
        self._check(generation)
        if request not in self._answers:
            try:
                total = int(self._values.get(key, b"0")) + amount
            except ValueError:
                raise Refused(400, f"The store's {key} is no number.") from None
            self.set(generation, key, str(total).encode())
            self._answers[request] = self._values[key]
        return int(self._answers[request])

    def compare_set(self, generation: int, key: str, expected: bytes, desired: bytes, request: str) -> bytes:
        """Store ``desired`` where the value is ``expected``, or where there is none and ``expected`` is empty.

        Returns the value after that; ``expected`` where there is none.

        Raises:
            Refused: another generation is present.
        """
        self._check(generation)
        if request not in self._answers:
            if self._values.get(key, b"") == expected:
                self.set(generation, key, desired)
            self._answers[request] = self._values.get(key, expected)
        return self._answers[request]

    def delete(self, generation: int, key: str) -> bool:
        """Forget a value; whether there was one.

        Raises:
            Refused: another generation is present.
        """
        self._check(generation)
        return self._values.pop(key, None) is not None

    def _check(self, generation: int) -> None:
        if generation != self.generation:
            raise Refused(410, f"Generation {generation} of this pool is over or has not begun.")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
