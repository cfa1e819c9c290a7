"""What a checkpoint says about how its tokens are to be chosen: `generation_config.json`."""

from __future__ import annotations

from pathlib import Path

from mkc.runtime.sampling import SamplingParams
from mkc.runtime.text.files import read_object

FILE = "generation_config.json"
NUMBERS = {"temperature": float, "top_k": int, "top_p": float, "min_p": float}
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
    given = {
        name: kind(found[name]) for name, kind in NUMBERS.items() if found.get(name) is not None
    }
    return SamplingParams(**{"temperature": 1.0, **given}, repetition_penalty=penalty)
