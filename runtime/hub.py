"""From what a person calls a model to the folder that holds it."""

from __future__ import annotations

from pathlib import Path

from daop.core import DaopError
from daop.runtime.safetensors_index import INDEX, read_weight_map

SMALL = ["*.json", "*.model", "*.txt", "*.jinja"]  # configuration and tokenizer


def model_folder(model: str | Path) -> Path:
    """A folder as it is; else a repository of the Hugging Face hub (``owner/name``), fetched into the hub's
    own cache if it is not there."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    name = str(model)
    if path.exists():
        raise DaopError(f"{name} is a file: give the folder that holds the model's config.json")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise DaopError(f"{name} is neither a folder nor a hub id (owner/name): check the path")
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=SMALL))  # and the index, if there is one
        revision = folder.name if folder.parent.name == "snapshots" else None
        if (folder / INDEX).exists():
            # Repositories often hold the weights twice, in another format or under other names.
            files = sorted(set(read_weight_map(folder / INDEX).values()))
        else:
            files = ["*.safetensors"]
        snapshot_download(name, revision=revision, allow_patterns=files, ignore_patterns=["*/*"])
    except errors.HFValidationError as error:
        raise DaopError(f"{name} is neither a folder nor a hub id: {error}") from error
    # Of the HTTP library that the hub happens to use, hence by way of the hub.
    except (OSError, ValueError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        raise DaopError(
            f"there is no folder {name!r}, and the hub did not give a model of that name "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): check the name and the "
            "connection, or download the model and give its folder"
        ) from error
    return folder
