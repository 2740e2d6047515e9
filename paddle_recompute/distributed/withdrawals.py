"""What one rank gives up and all ranks give up with it, such as a Program that was refused.

A rank gives up in the middle of a step, where no other rank is asked. It goes on by other means,
which are right for itself; the small collective that ends each step of a `GradientSync` tells the
others, who follow before their next step.
"""

from __future__ import annotations

import weakref
from typing import Protocol


class Member(Protocol):
    """Something that may be given up, in the same way on all ranks."""

    refusal: str
    """Why it was given up on this rank; "" if it was not."""

    def follow(self) -> None:
        """Another rank has given it up, or another member. Does nothing if it was given up here."""


_members: weakref.WeakKeyDictionary[object, Member] = weakref.WeakKeyDictionary()
_telling: weakref.WeakSet[object] = weakref.WeakSet()


def take_part(owner: object, member: Member) -> None:
    """Let `member` follow what other ranks give up, as long as `owner` lives.

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


def has_withdrawn() -> bool:
    """Whether a member was given up on this rank."""
    return any(member.refusal for member in _members.values())


def follow() -> None:
    """Some rank has given up a member: give up all of them."""
    for member in list(_members.values()):
        member.follow()
