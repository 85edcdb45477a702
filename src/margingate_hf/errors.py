"""How a bad input is refused: one sentence that names the argument, its value, what is allowed and what to do."""

from __future__ import annotations

from typing import Any


def refuse(argument: str, value: Any, allowed: str, kind: type[Exception] = ValueError) -> Exception:
    """An exception for an argument that the margin gate cannot honour."""
    return kind(f"`{argument}`={value!r} does not work with `margin_gate`: {allowed}.")
