"""Hardware profiles: described machines, one TOML file each, with the source of every figure.

A file has ``name``, ``about``, ``tier`` and three tables. ``[figures]`` are the fields of
``daop.runtime.costs.Hardware``; each stands also in ``[sources]`` (who measured it) or in ``[derived]``
(by which rule it was made up from other figures). ``daop calibrate`` writes the same format, and in a table
``[expert]`` with which experts it measured. ``[formats.NAME]`` says what computing experts in a number format
costs: measured (``Curve``) or assumed (``Shares``; ``[derived]`` has the reason as ``formats``).
``version`` is the file's; one without has no ``[formats]``.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from daop.core import DaopError
from daop.hardware.format_tables import parse_formats, quoted, render_formats
from daop.runtime.costs import Hardware
from daop.runtime.format_costs import Shares

FIGURES = frozenset(f.name for f in fields(Hardware)) - {"name", "tier", "curves"}
VERSION = 2
TABLES = ("figures", "sources", "derived", "expert", "formats")


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """A machine and where its figures come from. A measured one says with which experts it was measured."""

    hardware: Hardware
    about: str
    sources: dict[str, str]
    derived: dict[str, str]
    expert_bytes: int | None = None
    weight_bits: float | None = None
    shares: dict[str, Shares] = field(default_factory=dict)
    """By format; what was measured is in ``hardware.curves``."""


def names() -> list[str]:
    """The profiles that daop ships."""
    files = resources.files("daop.hardware").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load(name_or_path: str) -> HardwareProfile:
    """A shipped profile by name, or a TOML file by path."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        try:
            return parse(path.read_text(), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise DaopError(f"cannot read the hardware profile {path} (--hardware): {error}") from error
    if name_or_path not in names():
        raise DaopError(
            f"unknown hardware profile {name_or_path!r} (--hardware); known: {', '.join(names())}; "
            "or give a .toml file, which `daop calibrate -o machine.toml` writes for the machine at hand"
        )
    return parse(resources.files("daop.hardware").joinpath(f"{name_or_path}.toml").read_text(), name_or_path)


def parse(text: str, where: str) -> HardwareProfile:
    """Read a profile; raises DaopError naming the figure that is missing, unknown or absurd."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DaopError(f"the hardware profile {where} is not TOML: {error}") from error
    _check_version(data.get("version", 1), where)
    unknown = set(data) - {"version", "name", "about", "tier", *TABLES}
    tables = [data.get(table, {}) for table in TABLES]
    if unknown or not all(isinstance(table, dict) for table in tables):
        raise DaopError(
            f"the hardware profile {where} has entries that daop does not know: {sorted(unknown)}"
        )
    figures, sources, derived, expert, formats = tables
    if set(figures) - FIGURES:
        raise DaopError(f"the hardware profile {where} has unknown figures: {sorted(set(figures) - FIGURES)}")
    curves, shares = parse_formats(formats, where)
    bare = {*figures, *(["formats"] if shares else [])} - set(sources) - set(derived)
    if bare:
        raise DaopError(
            f"the hardware profile {where} gives no source for {sorted(bare)} ([sources], [derived])"
        )
    try:
        name, tier = str(data.get("name", where)), data.get("tier", "device")
        hardware = Hardware(name=name, tier=tier, curves=curves, **figures)
    except TypeError as error:
        missing = str(error).split(":", 1)[-1].strip()
        raise DaopError(f"the hardware profile {where} lacks figures: {missing}") from error
    return HardwareProfile(
        hardware=hardware,
        about=str(data.get("about", "")),
        sources={key: str(value) for key, value in sources.items()},
        derived={key: str(value) for key, value in derived.items()},
        shares=shares,
        **_expert(expert, where),
    )


def _check_version(version: object, where: str) -> None:
    if version not in range(1, VERSION + 1):
        raise DaopError(
            f"the hardware profile {where} is of version {version!r}, this daop reads up to {VERSION}: "
            "`daop calibrate` writes it again, or install the daop that wrote it"
        )


def _expert(table: dict[str, Any], where: str) -> dict[str, Any]:
    """``[expert]``: bytes and bits of a weight, both positive numbers."""
    for name, value in table.items():
        if name not in ("bytes", "weight_bits"):
            raise DaopError(f"the hardware profile {where} has an unknown entry {name!r} in [expert]")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e15:
            raise DaopError(f"the hardware profile {where}: {name} in [expert] is {value!r}, not a size")
    nbytes = table.get("bytes")
    return {
        "expert_bytes": None if nbytes is None else int(nbytes),
        "weight_bits": table.get("weight_bits"),
    }


def render(profile: HardwareProfile) -> str:
    """The profile as TOML."""
    hardware = profile.hardware
    usual = {f.name: f.default for f in fields(Hardware)}
    figures = {n: getattr(hardware, n) for n in usual if n in FIGURES and getattr(hardware, n) != usual[n]}
    lines = [f"version = {VERSION}", f"name = {quoted(hardware.name)}", f"about = {quoted(profile.about)}"]
    lines += [f"tier = {quoted(hardware.tier)}", "", "[figures]"]
    lines += [f"{name} = {value!r}" for name, value in figures.items()]
    if profile.expert_bytes is not None or profile.weight_bits is not None:
        lines += ["", "[expert]"]
        for name, value in (("bytes", profile.expert_bytes), ("weight_bits", profile.weight_bits)):
            lines += [] if value is None else [f"{name} = {value!r}"]
    lines += render_formats(hardware.curves, profile.shares)
    for title, table in (("sources", profile.sources), ("derived", profile.derived)):
        lines += ["", f"[{title}]", *(f"{key} = {quoted(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"
