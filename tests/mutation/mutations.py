"""The mutants: each kind is one mistake that a compiler, or an editor of a kernel, could make."""

from __future__ import annotations

from tests.mutation import expert_mutations
from tests.mutation import level_mutations
from tests.mutation import memory_mutations
from tests.mutation import part_mutations
from tests.mutation import rank_mutations
from tests.mutation import round_mutations
from tests.mutation import sampling_mutations
from tests.mutation import shape_mutations
from tests.mutation import walk_mutations
from tests.mutation.registry import MUTATIONS
from tests.mutation.registry import Mutation

# Importing a module adds its mutants to the list.
MODULES = (
    memory_mutations,
    rank_mutations,
    level_mutations,
    part_mutations,
    round_mutations,
    sampling_mutations,
    expert_mutations,
    shape_mutations,
    walk_mutations,
)

__all__ = ["MODULES", "MUTATIONS", "Mutation"]
