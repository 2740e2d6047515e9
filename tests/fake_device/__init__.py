"""A simulated device for Paddle's CustomDevice interface, and its switches for tests.

``PADDLE_RECOMPUTE_TEST_DEVICE=fake_device python -m pytest tests/recompute`` runs any test on it.
See README.md in this folder.
"""
