"""What a run is asked to be: checked when it is made, ``auto`` resolved into a new configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daop.core import DaopError
from daop.machine import asked_threads
from daop.units import parse_size

if TYPE_CHECKING:
    from daop.machine import Cpu

DEFAULT_POLICY = "adaptive"
MOST_THREADS = 1024  # OpenMP ends the process where it cannot start as many as it was asked for
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The options of ``daop.load``, as ``daop run`` and files give them.

    ``fast_memory``: bytes for resident experts; ``ecr``: their share instead; with neither as many as fit.
    ``dtype``: of everything but the routed experts (None: what the model says). ``threads`` None: one for
    each core that this process may use. ``context`` and ``batch``: what the KV cache is planned for.
    ``profile``: a folder with what other traffic taught; ``predictor``: that of a trained one.
    ``trace``: the file that the routing is recorded in.
    ``hardware``: what things cost here (None: a saved calibration, or a rule of thumb).
    """

    model: str
    device: str = "host"
    policy: str = DEFAULT_POLICY
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    fast_memory: int | None = None
    ecr: float | None = None
    direct_io: bool = False
    dtype: str | None = None
    threads: int | None = None
    context: int = 2048
    batch: int = 1
    seed: int = 0
    profile: str | None = None
    predictor: str | None = None
    trace: str | None = None
    trace_token_ids: bool = False
    hardware: str | None = None
    trace_distances: bool = False

    def __post_init__(self) -> None:
        if not self.model:
            raise DaopError("no model is given: name a folder of safetensors, or a hub id (owner/name)")
        if self.fast_memory is not None and self.ecr is not None:
            raise DaopError("give either --fast-memory or --ecr, not both: each sets how many experts fit")
        if self.fast_memory is not None and self.fast_memory < 0:
            raise DaopError(f"--fast-memory is {self.fast_memory}, but must not be negative")
        if self.ecr is not None and not 0 <= self.ecr <= 1:
            raise DaopError(f"--ecr is {self.ecr}, but must lie between 0 (no expert resident) and 1 (all)")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise DaopError(f"--dtype {self.dtype} is not known; known: {', '.join(DTYPES)}")
        for name in ("threads", "context", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DaopError(f"--{name} is {value}, but must be at least 1")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise DaopError(
                f"--threads is {self.threads}, but must be at most {MOST_THREADS}: one a core is best"
            )
        if not 0 <= self.seed < 1 << 64:
            raise DaopError(f"--seed is {self.seed}, but must lie between 0 and 2**64 - 1")

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> RunConfig:
        """From names and values; an unknown name raises. ``fast_memory`` may be a size ('2GiB') or 'auto'."""
        known = {option.name for option in dataclasses.fields(cls)}
        if unknown := sorted(set(options) - known):
            raise DaopError(f"unknown option {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        values = dict(options)
        if isinstance(values.get("fast_memory"), str):
            values["fast_memory"] = fast_memory_bytes(values["fast_memory"])
        return cls(**values)

    def resolved(self, cpu: Cpu) -> RunConfig:
        """The same with what was left to daop decided for this machine.

        OMP_NUM_THREADS is heeded. The size of the hot set is decided later, by ``plan_memory``, which knows
        the model.
        """
        return dataclasses.replace(self, threads=self.threads or asked_threads() or cpu.cores)

    def load_options(self) -> dict[str, Any]:
        """Keyword arguments for ``daop.load``."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "model"}


def fast_memory_bytes(text: str | None) -> int | None:
    """``--fast-memory`` as bytes; None for 'auto' and for nothing."""
    if text is None or text.strip().lower() == "auto":
        return None
    return parse_size(text, "--fast-memory")


def policy_options(pairs: list[str], tolerance: float | None = None) -> dict[str, Any]:
    """``NAME=VALUE`` options of a policy; values are JSON where they can be read as such, else text.

    ``tolerance`` is the option of that name.
    """
    import json

    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise DaopError(f"--policy-option {pair!r} is not of the form NAME=VALUE")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    if tolerance is not None:
        options["tolerance"] = tolerance
    return options
