"""The rules of the lint by code: what must hold, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from mkc.schedule.verify.issue import Issue


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Attributes:
    holds: what must hold.
    symptom: what happens on a chip when it does not.
    hint: what to do.
    """

    holds: str
    symptom: str
    hint: str


LINTS = {
    "L101": Rule(
        holds="a copy of rows begins and ends at a memory tile: 16 rows of bf16, 8 of 32 bits",
        symptom="compile failure, or other rows than meant",
        hint="move the aligned block and select the row",
    ),
    "L102": Rule(
        holds="a copy of lanes begins and ends at a register of 128 lanes",
        symptom="compile failure",
        hint="widen the buffer to whole registers",
    ),
    "L103": Rule(
        holds="a message has 1 row or whole tiles of 8 rows of 32 bits, or whole tiles of bf16",
        symptom="compile failure",
        hint="pad the message to whole tiles",
    ),
    "L104": Rule(
        holds="a copy has at least one row of 128 lanes of 32 bits",
        symptom="wrong data, without a word",
        hint="pad to a lane row, or pass scalars through SMEM",
    ),
    "L105": Rule(
        holds="activation buffers have whole tiles of 8 rows",
        symptom="corrupted results with fewer rows",
        hint="keep 8 rows and leave some unused",
    ),
    "L106": Rule(
        holds="every array that the kernel is called with is used by some phase",
        symptom="wrong results around operands that no statement reads",
        hint="drop the operand",
    ),
    "L107": Rule(
        holds="token ids and positions are i32",
        symptom="ids carried as f32 are flushed to zero as denormals",
        hint="keep ids as integers, also in exchanges",
    ),
    "L108": Rule(
        holds="a copy inside VMEM has at least 16 rows of bf16",
        symptom="the compiler crashes",
        hint="let the vector unit move it",
    ),
    "L201": Rule(
        holds="a statement `multiple_of` is true",
        symptom="the chip reads elsewhere; no interpreter notices",
        hint="state only what holds for every value",
    ),
    "L202": Rule(
        holds="a copy to another device has no priority",
        symptom="refused",
        hint="start it without a priority",
    ),
    "L203": Rule(
        holds="vector arithmetic is on signed integers or floats",
        symptom="the core crashes on unsigned vectors",
        hint="use signed integers",
    ),
    "L204": Rule(
        holds="no sort, no cumulative sum, and no stable top-k",
        symptom="no lowering",
        hint="compare, multiply with triangular ones, or reduce repeatedly",
    ),
    "L205": Rule(
        holds="a loop is unrolled fully or not at all",
        symptom="refused",
        hint="repeat the body in the source",
    ),
    "L206": Rule(
        holds="a kernel imports JAX and its support functions only, and changes neither",
        symptom="what is traced depends on something that the plan does not know",
        hint="import `jax`, `functools`, `typing` and `mkc.codegen_pallas.support`",
    ),
    "L207": Rule(
        holds="the kernel file is Python",
        symptom="it cannot be run",
        hint="mend the syntax",
    ),
    "L208": Rule(
        holds="a row of bf16 that is chosen at run time begins a memory tile of 8 rows, provably",
        symptom="compile failure",
        hint="read the aligned block and select the row, or keep such rows as f32",
    ),
    "L209": Rule(
        holds="a copy is between arrays as they are, not reshaped or reinterpreted",
        symptom="compile failure where tiles do not stay whole; interpret mode fails too",
        hint="allocate the array as rows and columns of the copy",
    ),
    "L210": Rule(
        holds="a vector of booleans is not reshaped",
        symptom="compile failure",
        hint="reshape what is compared, or compare an iota of the shape that is wanted",
    ),
}


def issue(code: str, where: str, message: str) -> Issue:
    return Issue(code=code, message=message, where=where, hint=LINTS[code].hint)
