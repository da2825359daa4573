"""Enlarges a checkpoint's experts to realistic sizes without changing its function (see ``daop/widen.py``).

python benchmarks/widen_model.py SRC DST --intermediate 4096
python benchmarks/widen_model.py SRC DST --target-gib 8
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from daop.core import DaopError
from daop.widen import widen


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="model folder")
    parser.add_argument("target", type=Path, help="folder to write; must not exist")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--intermediate", type=int, help="new intermediate size of each expert")
    size.add_argument("--target-gib", type=float, help="enlarge until all experts take about this much")
    args = parser.parse_args()
    try:
        done = widen(
            args.source,
            args.target,
            intermediate=args.intermediate,
            target_bytes=args.target_gib and args.target_gib * 2**30,
            progress=lambda step, share: print(f"{step}  {share:.0%}", flush=True),
        )
    except DaopError as error:
        sys.exit(f"error: {error}")
    print(
        json.dumps(
            {
                "intermediate": done.intermediate,
                "bytes": done.total_bytes,
                "expert_bytes": done.expert_bytes,
                "target": str(done.folder),
            }
        )
    )


if __name__ == "__main__":
    main()
