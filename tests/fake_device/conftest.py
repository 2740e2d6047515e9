"""These tests are about the simulated device, so they run on it alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_device import selected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if selected.is_selected():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="for the simulated device: make test-device"))
