"""The proof of a program, before any hardware: see `docs/verifier.md`."""

from __future__ import annotations

from mkc.schedule.verify.issue import CODES
from mkc.schedule.verify.issue import OBLIGATIONS
from mkc.schedule.verify.issue import Issue
from mkc.schedule.verify.proof import Proof
from mkc.schedule.verify.proof import prove
from mkc.schedule.verify.proof import verify_program

__all__ = ["CODES", "OBLIGATIONS", "Issue", "Proof", "prove", "verify_program"]
