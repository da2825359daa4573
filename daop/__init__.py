"""daop: adaptive predictive-prefetch runtime for Mixture-of-Experts language models.

    import daop
    with daop.load("path/to/model", ecr=0.25) as runtime:
        for text in runtime.stream("The hot set"):
            ...

Importing this module is cheap; torch and transformers are loaded by the first use of ``load``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daop.api import Runtime, load

__version__ = "0.1.0"
__all__ = ["Runtime", "load"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from daop import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
