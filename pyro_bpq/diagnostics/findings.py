"""A diagnosis and its findings."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

SEVERITIES = ("error", "warning", "hint")


@dataclass(frozen=True)
class Finding:
    """One finding of a diagnosis.

    Args:
        kind: A short fixed name, for programs that read it.
        severity: ``"error"``: results are wrong; ``"warning"``: learning is slower than it could be; ``"hint"``.
        message: Description of the problem, with the figures behind it.
        advice: Suggested remedy.
        sites: The sites concerned.
    """

    kind: str
    severity: str
    message: str
    advice: str
    sites: tuple[str, ...] = ()

    def __str__(self) -> str:
        body = textwrap.wrap(f"{self.severity}: {self.message}", 110, subsequent_indent="    ")
        advice = textwrap.wrap(f"-> {self.advice}", 110, initial_indent="    ", subsequent_indent="       ")
        return "\n".join([*body, *advice])


@dataclass(frozen=True)
class Diagnosis:
    """All findings, the most severe first.

    Args:
        findings: The findings.
        checked: Description of the examined steps, in words.
    """

    findings: tuple[Finding, ...]
    checked: str = ""

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def kinds(self) -> frozenset[str]:
        """The kinds that were found."""
        return frozenset(finding.kind for finding in self.findings)

    def __str__(self) -> str:
        found = [str(finding) for finding in self.findings] or ["No problem was found."]
        return "\n".join([*found, *([f"({self.checked})"] if self.checked else [])])
