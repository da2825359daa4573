"""Where calibrations of this machine are kept, and which of them a run finds.

``daop calibrate MODEL`` writes a hardware profile (``daop.hardware``: TOML, read again by ``daop compare
--hardware FILE`` and ``daop run --hardware FILE``) and a copy under the user's cache folder. There a run of
the same model's kind on the same machine finds it: the name holds a digest of processor, threads, disk, how
experts lie in memory, and the size of the model around them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from daop import machine
from daop.core import DaopError
from daop.hardware import HardwareProfile, load, render
from daop.runtime.calibrate import Calibration
from daop.runtime.checkpoint import Checkpoint
from daop.runtime.costs import Hardware


def folder() -> Path:
    """``$XDG_CACHE_HOME/daop/machines``, or the same under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "daop" / "machines"


def place(checkpoint: Checkpoint) -> Path:
    """The file of this machine's calibration for models of this shape, whether it is there or not."""
    cpu, disk = machine.read_cpu(), machine.read_disk(checkpoint.path)
    config = checkpoint.skeleton.config.get_text_config()
    shape = [
        *(cpu.name, cpu.threads, os.environ.get("OMP_NUM_THREADS", ""), disk.device, disk.filesystem),
        *(checkpoint.skeleton.model_type, int(config.hidden_size), checkpoint.geometry.layers),
        *([part.role, *part.shape, part.dtype] for part in checkpoint.layouts[0].parts),
    ]
    digest = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:12]
    size = checkpoint.layouts[0].stored_bytes
    return folder() / f"{checkpoint.skeleton.model_type}-{size}-{digest}.toml"


def as_profile(calibration: Calibration, about: str) -> HardwareProfile:
    """A calibration in the form of the profiles that daop ships."""
    return HardwareProfile(
        hardware=calibration.hardware,
        about=about,
        sources=calibration.sources,
        derived={},
        expert_bytes=calibration.expert_bytes,
        weight_bits=calibration.weight_bits,
    )


def save(profile: HardwareProfile, checkpoint: Checkpoint) -> Path | None:
    """Keep it for later runs of this model's kind; None where the cache folder cannot be written."""
    path = place(checkpoint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(render(profile))
        os.replace(name, path)
    except OSError:
        return None
    return path


def costs_for(checkpoint: Checkpoint, asked: str | None) -> tuple[Hardware | None, str]:
    """What things cost where this model runs on the device ``host``, and where that is from.

    ``asked``: a profile's name or file; None looks for a saved calibration. Without one there is no machine:
    costs are by rule of thumb.
    """
    if asked is not None:
        found = load(asked).hardware
        if found.tier != "host":
            raise DaopError(
                f"--hardware {asked} describes a GPU (tier {found.tier!r}), but the model runs on the device "
                "host; measure this machine with `daop calibrate MODEL -o machine.toml`"
            )
        return found, asked
    path = place(checkpoint)
    if not path.is_file():
        return None, "rule of thumb (`daop calibrate MODEL` measures this machine)"
    try:
        return load(str(path)).hardware, str(path)
    except DaopError:
        return None, f"rule of thumb, for {path} is damaged; `daop calibrate MODEL` writes it again"
