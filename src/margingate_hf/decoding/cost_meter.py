"""Measured times of draft steps and verify forwards, as two straight lines over their sizes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Costs:
    """
    Seconds on this machine. A draft step takes `draft_fixed + draft_row * rows`, a verify forward
    `verify_fixed + verify_token * tokens`.
    """

    draft_fixed: float
    draft_row: float
    verify_fixed: float
    verify_token: float


@dataclass
class Line:
    """Least squares `seconds = fixed + each * count`, old observations fading by `KEEP` at each new one."""

    KEEP = 0.97
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, count: int, seconds: float) -> None:
        """One observation."""
        for name, value in (
            ("weight", 1.0),
            ("x", count),
            ("y", seconds),
            ("xx", count * count),
            ("xy", count * seconds),
        ):
            setattr(self, name, getattr(self, name) * self.KEEP + value)

    def fit(self) -> tuple[float, float] | None:
        """`(fixed, each)`, neither negative, or `None` before the first observation."""
        if not self.weight:
            return None
        spread = self.xx * self.weight - self.x * self.x
        if spread <= 1e-9 * self.xx * self.weight:  # one count only: all of it may be fixed
            return self.y / self.weight, 0.0
        each = max(0.0, (self.xy * self.weight - self.x * self.y) / spread)
        fixed = (self.y - each * self.x) / self.weight
        return (fixed, each) if fixed >= 0 else (0.0, self.xy / self.xx)


@dataclass
class CostMeter:
    """
    Learns [`Costs`] from the draft steps and verify forwards of one verifier, across calls.

    The first step is not counted: it packs weights and generates code. If drafting has stopped because steps looked
    expensive, the estimate is reset after `RETRY` verify forwards, in case the slow measurement was noise.
    """

    RETRY = 32
    steps: Line = field(default_factory=Line)
    forwards: Line = field(default_factory=Line)
    warm: bool = False
    idle: int = 0

    def add_draft_step(self, rows: int, seconds: float) -> None:
        """A draft step of so many rows."""
        if self.warm:
            self.steps.add(rows, seconds)
        self.warm, self.idle = True, 0

    def add_verify(self, tokens: int, seconds: float) -> None:
        """A verify forward over so many tokens."""
        self.forwards.add(tokens, seconds)
        self.idle += 1
        if self.idle >= self.RETRY:
            self.steps, self.idle = Line(), 0

    def costs(self) -> Costs | None:
        """What has been measured, or `None` before a step and a verify forward have been."""
        step, full = self.steps.fit(), self.forwards.fit()
        return None if step is None or full is None else Costs(*step, *full)
