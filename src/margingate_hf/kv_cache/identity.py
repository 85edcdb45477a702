"""What a committed entry is a function of, beside its tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class CacheIdentity:
    """
    What a committed entry is a function of, beside its tokens.

    Attributes:
        weights: hash of weights, buffers and adapter state.
        plan: the verifier's plan.
        precision: its arithmetic.
    """

    weights: str
    plan: str
    precision: str

    def mismatch(self, other: CacheIdentity) -> str | None:
        """The first field that differs, in words, or `None`."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name} {mine!r}, now {theirs!r}"
        return None
