"""A testbed of the tests' own, always taken down."""

import os
import shutil
from collections.abc import Iterator

import pytest

from potluck import testbed
from potluck.errors import PotluckError

PREFIX = "ptest"


@pytest.fixture
def prefix() -> Iterator[str]:
    """A prefix under which nothing is up, before and after."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("iproute2 is not installed")
    testbed.down(PREFIX)
    try:
        testbed.up([1], 10**9, prefix=PREFIX)
    except PotluckError as error:
        pytest.skip(f"this machine makes no testbed: {error}")
    testbed.down(PREFIX)
    yield PREFIX
    testbed.down(PREFIX)
