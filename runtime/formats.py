"""Number formats by name (``format_names``): which codec, and how an expert of a model lies in one."""

from __future__ import annotations

from daop.core import DaopError
from daop.runtime.codecs.base import Codec
from daop.runtime.codecs.fp8 import Fp8
from daop.runtime.codecs.integers import Integers
from daop.runtime.codecs.mxfp4 import Mxfp4
from daop.runtime.codecs.plain import PLAIN
from daop.runtime.experts import Experts
from daop.runtime.format_names import BITS, GROUPS, PAGE
from daop.runtime.layout import ExpertLayout
from daop.runtime.packed import expected_parts


def codec_of(name: str) -> Codec:
    """The codec of a format; ``DaopError`` lists the known ones."""
    if name not in BITS:
        raise DaopError(f"format {name!r} is not known; known: {', '.join(BITS)}")
    if name in GROUPS:
        return Integers(int(name[3:]), GROUPS[name])
    return {"fp8": Fp8(), "mxfp4": Mxfp4()}.get(name, PLAIN)


def format_of(layout: ExpertLayout) -> str:
    """The name of the format that a layout's weights are in."""
    if layout.codec != PLAIN:
        return layout.codec.name
    down = layout.part("down")
    return "bf16" if down is None else down.dtype.lower()


def layout_in(experts: Experts, layout: ExpertLayout, name: str) -> ExpertLayout:
    """How experts that lie as ``layout`` would lie in another format: INT8 and INT4 in whole pages, as
    ``daop pack`` writes them."""
    codec = codec_of(name)
    if format_of(layout) == name and (codec == PLAIN or name not in GROUPS):
        return layout
    plain = name.upper() if codec == PLAIN else "BF16"
    roles = {part.role for part in layout.parts}
    made = ExpertLayout.pack(
        [
            (role, piece.shape, plain if plain in piece.dtypes else piece.dtypes[0])
            for role, piece in expected_parts(experts, codec, roles).items()
        ],
        codec,
    )
    if name not in GROUPS:
        return made
    nbytes = -(-made.nbytes // PAGE) * PAGE
    return ExpertLayout(parts=made.parts, nbytes=nbytes, stored_bytes=nbytes, codec=codec)
