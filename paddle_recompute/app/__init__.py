"""The application: what people run. It is made of the library's rooms, which know nothing of it.

A YAML file becomes a `Config` (``config``); the launcher starts the ranks (``launch``); each rank
reads the pairs (``data``), builds the encoder (``encoder``) and trains it (``trainer``).
``retrieval`` encodes and searches, ``parity`` compares the two modes,
``cli`` is the command.
"""
