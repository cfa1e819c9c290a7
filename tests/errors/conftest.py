"""Fixtures of this folder."""

from __future__ import annotations

from tests.errors.command import command

__all__ = ["command"]
