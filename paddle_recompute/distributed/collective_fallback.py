"""Collective fallback: what one rank leaves, such as a refused Program, all ranks leave.

A rank falls back in the middle of a step, where it cannot ask the others. It goes on by other
means, which are right for itself; the small collective that ends each step of a `GradientSync`
tells the others, who follow before their next step.
"""

from __future__ import annotations

import weakref
from typing import Protocol


class Member(Protocol):
    """Something that all ranks can fall back from in the same way."""

    refusal: str
    """Why this rank fell back; "" if it did not."""

    def follow(self) -> None:
        """Another rank or member has fallen back. Does nothing if this one already has."""


_members: weakref.WeakKeyDictionary[object, Member] = weakref.WeakKeyDictionary()
_telling: weakref.WeakSet[object] = weakref.WeakSet()


def take_part(owner: object, member: Member) -> None:
    """Let `member` follow the fallback of other ranks, as long as `owner` lives.

    Args:
        owner: What `member` belongs to; it may have one member, the last one. `member` must not
            hold it.
        member: What follows.
    """
    _members[owner] = member


def tell_with(collective: object) -> None:
    """`collective` tells the other ranks at the end of each step, as long as it is there."""
    _telling.add(collective)


def is_told() -> bool:
    """Whether anything tells the other ranks."""
    return bool(_telling)


def has_fallen_back() -> bool:
    """Whether a member fell back on this rank."""
    return any(member.refusal for member in _members.values())


def follow() -> None:
    """Some rank has fallen back: let all members fall back."""
    for member in list(_members.values()):
        member.follow()
