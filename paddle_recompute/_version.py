"""The version of this library, once."""

__version__ = "0.2.0"
