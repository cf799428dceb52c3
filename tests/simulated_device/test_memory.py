"""Where memory of a simulated device begins and ends."""

from __future__ import annotations

import pytest

from tests.simulated_device.memory import Region

pytestmark = pytest.mark.any_core


def test_the_byte_behind_a_region_is_not_one_of_it() -> None:
    region = Region(1 << 20, protected=True)
    assert region.holds(region.begin)
    assert region.holds(region.end - 1)
    assert not region.holds(region.end)
    assert not region.holds(region.begin - 1)
