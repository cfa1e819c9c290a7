"""What a checkpoint says about how its tokens are to be chosen: `generation_config.json`."""

from __future__ import annotations

from pathlib import Path

from mkc.runtime.sampling import SamplingParams
from mkc.runtime.text.files import read_object

FILE = "generation_config.json"
NUMBERS = ("temperature", "top_k", "top_p", "min_p")
PENALTY = "repetition_penalty"


def default_sampling(folder: Path) -> SamplingParams:
    """The sampling that the checkpoint in `folder` asks for; greedy where it asks for nothing.

    Raises:
      TokenizerFileError: the file is no JSON object.
      GenerationOptionError: a number in it is out of its range.
    """
    found = read_object(folder / FILE)
    penalty = float(found.get(PENALTY) or 1.0)
    if not found.get("do_sample"):
        return SamplingParams(repetition_penalty=penalty)
    # Absent or null means that the rule does not apply; a temperature of 1 changes nothing.
    given = {name: found[name] for name in NUMBERS if found.get(name) is not None}
    return SamplingParams(
        temperature=float(given.get("temperature", 1.0)),
        top_k=int(given.get("top_k", 0)),
        top_p=float(given.get("top_p", 1.0)),
        min_p=float(given.get("min_p", 0.0)),
        repetition_penalty=penalty,
    )
