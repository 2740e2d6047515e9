"""Property tests here are judged by what they find, not by how fast a busy machine is."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("data", deadline=None, max_examples=60)
settings.load_profile("data")
