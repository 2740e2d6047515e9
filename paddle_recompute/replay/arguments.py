"""What the opaque arguments of a call hold: compared before its two forwards, to name a culprit.

An object among the arguments that is no tensor, container or dataclass is handed to the second
forward as it is. If the first forward changed its content in a way that `reach` cannot undo, as
into a cache with ``__slots__``, the two forwards differ. `Opaque` tells which argument that was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paddle_recompute import _nested
from paddle_recompute._nested import describe

_LEAVES = frozenset({int, float, str, bytes, complex, bool, type(None)})
_DEEPEST = 4
_MOST = 500


class Opaque:
    """The opaque arguments of one call; to be made before its first forward."""

    __slots__ = ("_found",)

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._found = [
            (what, path, leaf, _content(leaf))
            for value, what in ((args, "positional argument"), (kwargs, "keyword argument"))
            for path, leaf in _nested.named_leaves(value)
            if type(leaf) not in _LEAVES and not _nested.is_tensor(leaf) and _has_attributes(leaf)
        ]

    def changed(self) -> str:
        """A sentence that names each argument with another content than at first; or nothing."""
        names = [
            f"{what} {path} ({type(leaf).__name__}), which held {_said(before)} and now holds "
            f"{_said(_content(leaf))}"
            for what, path, leaf, before in self._found
            if _content(leaf) != before
        ]
        if not names:
            return ""
        return (
            f"The forward has changed its {'; its '.join(names)}. A cache of keys and values, "
            "which serves generation alone, would be filled twice: use_cache=False avoids it. "
            "Let other arguments stay as they are."
        )


def _has_attributes(value: Any) -> bool:
    return not isinstance(value, type) and not callable(value) and bool(_attributes(value))


def _attributes(value: Any) -> list[str]:
    names = [name for kind in type(value).__mro__ for name in kind.__dict__.get("__slots__", ())]
    return [*getattr(value, "__dict__", ()), *(n for n in names if not n.startswith("__"))]


def _content(value: Any) -> list[str]:
    """What is inside, in words that are equal for equal structure."""
    words: list[str] = []
    for word in _walk(value, 0):
        words.append(word)
        if len(words) >= _MOST:
            break
    return words


def _walk(value: Any, depth: int) -> Iterator[str]:
    for path, leaf in _nested.named_leaves(value):
        if _nested.is_tensor(leaf):
            yield f"{path} {describe(leaf)}"
        elif type(leaf) in _LEAVES or depth >= _DEEPEST:
            yield f"{path} {type(leaf).__name__}"
        else:
            for name in _attributes(leaf):
                for word in _walk(getattr(leaf, name, None), depth + 1):
                    yield f"{path}.{name}{word}"


def _said(content: list[str]) -> str:
    tensors = [word.split(" ", 1)[1] for word in content if word.endswith("]")]
    listed = ", ".join(tensors[:2]) + (" ..." if len(tensors) > 2 else "")
    return f"{len(tensors)} tensors ({listed})" if tensors else "no tensor"
