"""What the doctor found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or may be.

    Attributes:
        kind: A short name of it, such as ``"gradient_differs"``.
        where: The first sublayer, parameter or rank that shows it; empty for the whole model.
        message: What is wrong, and what to do.
    """

    kind: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.where or 'the model'}: {self.message}"


@dataclass
class DoctorReport:
    """The result of `doctor`.

    Attributes:
        findings: The faults: wrong numbers, or a step that fails; empty if the model is sound.
        warnings: What trains rightly, and may not be meant: a parameter that the loss does not use.
        notes: What was examined, and remarks.
    """

    findings: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no fault was found; warnings do not count."""
        return not self.findings

    def add(self, kind: str, where: str, message: str) -> None:
        """Add a fault, unless one of this kind and place exists."""
        _add(self.findings, Finding(kind, where, message))

    def warn(self, kind: str, where: str, message: str) -> None:
        """Add a warning, unless one of this kind and place exists."""
        _add(self.warnings, Finding(kind, where, message))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"  {note}" for note in self.notes]
        if self.warnings:
            lines += [f"{_counted(self.warnings, 'warning')}:", *map(_line, self.warnings)]
        if self.ok:
            return "\n".join([*lines, "ok: no fault found"])
        head = f"{_counted(self.findings, 'fault')} found:"
        return "\n".join([*lines, head, *map(_line, self.findings)])


def _add(found: list[Finding], new: Finding) -> None:
    if not any((known.kind, known.where) == (new.kind, new.where) for known in found):
        found.append(new)


def _counted(found: list[Finding], what: str) -> str:
    return f"{len(found)} {what}{'s' if len(found) > 1 else ''}"


def _line(finding: Finding) -> str:
    return f"- {finding}"
