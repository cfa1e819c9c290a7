"""Checkpoints of the Hugging Face hub, through its own client: cache, revisions, offline mode."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.errors import RevisionNotFoundError

from mkc.errors import CheckpointError

# What is fetched: weights, configs, and every form of tokenizer and chat template.
FETCHED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")


def fetch(name: str, revision: str | None) -> Path:
    """The snapshot folder of a hub checkpoint, downloaded where needed and allowed.

    Raises:
      CheckpointError: there is no such checkpoint, or it is not in the cache while offline.
    """
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(FETCHED)))
    except HFValidationError as error:
        raise CheckpointError(
            name=name,
            problem="is neither a folder nor a name of the Hugging Face hub",
            hint="Name a checkpoint folder, or a checkpoint as OWNER/NAME",
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            name=name,
            problem=f"has no revision '{revision}'",
            hint="Name a branch, a tag or a whole commit hash of it",
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            name=name,
            problem="the Hugging Face hub has none of this name, or it is private",
            hint="Correct the name; for a private one set HF_TOKEN",
        ) from error
    except Exception as error:  # the client lets errors of whichever HTTP library it uses through
        at = f" at revision '{revision}'" if revision else ""
        raise CheckpointError(
            name=name,
            problem=f"is no folder, is not in the hub's cache{at}, and cannot be downloaded "
            f"({type(error).__name__}: offline, or the hub did not answer)",
            hint="Correct the path, download it where there is a network, or unset HF_HUB_OFFLINE",
        ) from error
