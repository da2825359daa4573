"""``[formats.NAME]`` of a hardware profile: what computing experts in a number format costs.

Measured, as ``daop calibrate --format`` writes it (``Curve``): ``bytes`` of the expert, ``tokens`` and
``microseconds`` for each of them, ``source``. Assumed (``Shares``): ``host``, ``host_rate``, ``device`` and
``device_rate``, shares of the machine's figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from daop.core import DaopError
from daop.runtime.format_costs import Curve, Shares
from daop.runtime.format_names import BITS

MEASURED = {"bytes", "tokens", "microseconds", "source"}


def parse_formats(table: Mapping[str, Any], where: str) -> tuple[tuple[Curve, ...], dict[str, Shares]]:
    """Raises DaopError naming the profile, the format and what is wrong."""
    curves, shares = [], {}
    for name, said in table.items():
        if name not in BITS:
            raise DaopError(
                f"the hardware profile {where} has costs of {name!r}, which is no format of daop's: "
                f"{', '.join(BITS)}"
            )
        wanted = (
            MEASURED if isinstance(said, dict) and "microseconds" in said else set(Shares.__annotations__)
        )
        if not isinstance(said, dict) or set(said) != wanted:
            raise DaopError(
                f"the hardware profile {where}: [formats.{name}] needs exactly {', '.join(sorted(wanted))}"
            )
        try:
            if wanted == MEASURED:
                curves.append(_curve(name, said))
            else:
                shares[name] = Shares(**said)
        except (DaopError, TypeError) as error:
            raise DaopError(f"the hardware profile {where}: [formats.{name}]: {error}") from error
    return tuple(curves), shares


def _curve(name: str, said: Mapping[str, Any]) -> Curve:
    return Curve(
        format=name,
        nbytes=said["bytes"],
        tokens=tuple(said["tokens"]),
        microseconds=tuple(said["microseconds"]),
        source=str(said["source"]),
    )


def render_formats(curves: Sequence[Curve], shares: Mapping[str, Shares]) -> list[str]:
    """Lines of TOML."""
    lines: list[str] = []
    for curve in curves:
        lines += ["", f"[formats.{curve.format}]", f"bytes = {curve.nbytes}"]
        lines += [f"tokens = {list(curve.tokens)}", f"microseconds = {list(curve.microseconds)}"]
        lines += [f"source = {quoted(curve.source)}"]
    for name, share in shares.items():
        lines += ["", f"[formats.{name}]", *(f"{key} = {value!r}" for key, value in vars(share).items())]
    return lines


def quoted(text: str) -> str:
    """A string of TOML; what cannot be printed becomes a space."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    return '"' + clean.replace("\\", "\\\\").replace('"', '\\"') + '"'
