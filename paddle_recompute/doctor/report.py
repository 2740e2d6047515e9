"""What the doctor found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: A short name of the fault, such as ``"gradient_differs"``.
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
        findings: What is wrong; empty if the model is sound.
        notes: What was examined, and remarks.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def add(self, kind: str, where: str, message: str) -> None:
        """Add a finding, unless one of this kind and place exists."""
        if not any((one.kind, one.where) == (kind, where) for one in self.findings):
            self.findings.append(Finding(kind, where, message))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"  {note}" for note in self.notes]
        if self.ok:
            return "\n".join([*lines, "ok: no fault found"])
        count = len(self.findings)
        head = f"{count} {'fault' if count == 1 else 'faults'} found:"
        return "\n".join([*lines, head, *(f"- {finding}" for finding in self.findings)])
