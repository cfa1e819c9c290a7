"""Published times of TPU7x kernels and the kernels they are of, as far as these were described.

Origins: H is the Helion branch of 8 devices and one device (jax 0.10), I is Inferact's
tpu-megakernels. A `body` time is in-kernel, a `loop` time is a step of a host-side chain and
includes the fixed cost of a launch. `FITTED` names the measurements that the constants marked
"derived: fit" in `mkc/targets/tpu7x.toml` come from; all others are predicted by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace

from bench.calibration.kernels import ARENA
from bench.calibration.kernels import BF16
from bench.calibration.kernels import F32
from bench.calibration.kernels import Exchange
from bench.calibration.kernels import Matrix
from bench.calibration.kernels import StreamKernel
from bench.calibration.kernels import gather
from bench.calibration.kernels import in_rounds
from bench.calibration.kernels import one_shot
from bench.calibration.kernels import two_phase

MIB = 1 << 20
LAYERS = 8  # simulated of the published 32 or 64 equal layers
ONE_ROW = one_shot(5120 * F32, 8)
EIGHT_ROWS = one_shot(8 * 5120 * F32, 8)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A published time and its kernel.

    Attributes:
      id: series and variant.
      origin: H or I.
      us: the published time of `per` simulated parts (layers or dots).
      launch: the time includes the fixed cost of a launch.
    """

    id: str
    origin: str
    us: float
    kernel: StreamKernel
    per: int = 1
    launch: bool = False


@dataclass(frozen=True, kw_only=True)
class Unmatched:
    """A published time that is not compared, and why."""

    id: str
    us: str
    reason: str


def measurements() -> tuple[Measurement, ...]:
    """All that are compared."""
    return tuple(
        one
        for series in (
            _ring_depth,
            _dense_mlp,
            _resident_dots,
            _waits,
            _stream_small,
            _stream_big,
            _exchanges,
            _pairs,
            _decode,
            _others,
        )
        for one in series()
    )


FITTED = frozenset(
    {
        *(f"C3 resident dot, {name}" for name in ("128x2176", "256x1280", "128x5120", "5120x256")),
        *(f"C4 waits, by {group}" for group in (1, 2, 4)),
        "C6 one shot, 1 row",
        "C6 one shot, 8 rows",
        "C6 gather 8x512 bf16",
        "C6 gather 8x1024 bf16",
        "C6 gather 16x1024 bf16",
        "C6 pair, sibling, 256 KiB",
        "C6 pair, sibling, 16 MiB",
        "C6 pair, other chip, 256 KiB",
        "C6 pair, other chip, 16 MiB",
    }
)


def _ring_depth() -> Iterator[Measurement]:
    layer = (Matrix(tiles=80, tile_bytes=128 * 2176 * BF16),)
    published = {4: 31.85, 6: 21.86, 8: 16.73, 12: 13.14, 16: 12.26, 32: 12.02}
    for slots, us in published.items():
        kernel = StreamKernel(
            layers=(layer,) * 2, slots={ARENA: slots}, group=2, tiles_per_step=2, filled=True
        )
        yield Measurement(id=f"C1 ring of {slots}", origin="H", us=us, kernel=kernel, per=2)


def _dense_mlp() -> Iterator[Measurement]:
    layer = (Matrix(tiles=144, tile_bytes=256 * 4096 * BF16),)

    def kernel(slots: int, dots: bool = True) -> StreamKernel:
        return StreamKernel(layers=(layer,), slots={ARENA: slots}, dots=dots)

    yield Measurement(id="C2 synchronous copies", origin="H", us=290.0, kernel=kernel(1))
    yield Measurement(id="C2 ring of 2, copies only", origin="H", us=127.0, kernel=kernel(2, False))
    for slots, us in {8: 98.6, 12: 98.4, 16: 98.7}.items():
        yield Measurement(id=f"C2 ring of {slots}", origin="H", us=us, kernel=kernel(slots))
    yield Measurement(id="C2 tuned", origin="H", us=96.0, kernel=kernel(16))
    yield Measurement(id="C2 tuned, copies only", origin="H", us=91.7, kernel=kernel(16, False))


def _resident_dots() -> Iterator[Measurement]:
    published = {(128, 2176): 0.218, (256, 1280): 0.232, (128, 5120): 0.312, (5120, 256): 0.537}
    dots = 100
    for (rows, columns), us in published.items():
        matrix = Matrix(tiles=dots, tile_bytes=rows * columns * BF16)
        kernel = StreamKernel(layers=((matrix,),), copies=False, stores_results=True)
        name = f"C3 resident dot, {rows}x{columns}"
        yield Measurement(id=name, origin="H", us=us, kernel=kernel, per=dots)


def _small(
    rings: tuple[str, str, str] = (ARENA, ARENA, ARENA), *exchange: Exchange
) -> tuple[Matrix | Exchange, ...]:
    """80 MB of small tiles, with an exchange behind the first and the last matrix."""
    return (
        Matrix(tiles=20, tile_bytes=256 * 1280 * BF16, ring=rings[0]),
        *exchange,
        Matrix(tiles=80, tile_bytes=128 * 2176 * BF16, ring=rings[1]),
        Matrix(tiles=34, tile_bytes=128 * 2560 * BF16, ring=rings[2]),
        *exchange,
    )


def _waits() -> Iterator[Measurement]:
    layers = (_small(),) * LAYERS
    kernel = StreamKernel(layers=layers, copies=False, tiles_per_step=4)
    yield Measurement(id="C4 dots only", origin="H", us=13.11, kernel=kernel, per=LAYERS)
    for group, us in {1: 29.6, 2: 20.9, 4: 17.1, 8: 16.2}.items():
        kernel = StreamKernel(
            layers=layers, slots={ARENA: 34}, stub_bytes=4096, group=group, tiles_per_step=4
        )
        name = f"C4 waits, by {group}"
        yield Measurement(id=name, origin="H", us=us, kernel=kernel, per=LAYERS)


def _stream_small() -> Iterator[Measurement]:
    names = ("a", "b", "c")
    rings = {"a": 8, "b": 16, "c": 12}
    for label, dots, group, alone, with_exchanges in (
        ("copies only", False, 1, 27.78, 33.50),
        ("wait per tile", True, 1, 26.32, 34.18),
        ("waits by 4", True, 4, 26.98, 34.94),
        ("waits by 8", True, 8, 29.29, 37.35),
    ):
        yield from _pair(
            f"C5 small, 3 rings, {label}",
            StreamKernel(
                layers=(_small(names),) * LAYERS,
                slots=rings,
                dots=dots,
                group=group,
                tiles_per_step=4,
            ),
            (_small(names, ONE_ROW),) * LAYERS,
            alone,
            with_exchanges,
        )
    arena = (_small(),) * LAYERS
    met = (_small((ARENA, ARENA, ARENA), ONE_ROW),) * LAYERS
    yield from _pair(
        "C5 small, arena of 34, copies only",
        StreamKernel(layers=arena, slots={ARENA: 34}, dots=False, tiles_per_step=4),
        met,
        24.58,
        25.24,
    )
    yield from _pair(
        "C5 small, dots only",
        StreamKernel(layers=arena, copies=False, tiles_per_step=4),
        met,
        12.79,
        21.07,
    )
    for slots, alone, with_exchanges in ((34, 24.75, 32.75), (50, 24.79, 32.76), (70, 25.0, 32.89)):
        yield from _pair(
            f"C5 small, arena of {slots}",
            StreamKernel(layers=arena, slots={ARENA: slots}, tiles_per_step=4),
            met,
            alone,
            with_exchanges,
        )


def _pair(
    name: str,
    kernel: StreamKernel,
    met: tuple[tuple[Matrix | Exchange, ...], ...],
    alone: float,
    with_exchanges: float,
) -> Iterator[Measurement]:
    """A kernel without and with exchanges."""
    together = replace(kernel, layers=met, ranks=8)
    yield Measurement(id=name, origin="H", us=alone, kernel=kernel, per=LAYERS)
    yield Measurement(
        id=f"{name}, exchanges", origin="H", us=with_exchanges, kernel=together, per=LAYERS
    )


def _big(*exchange: Exchange) -> tuple[Matrix | Exchange, ...]:
    """The 80 MB in 33 tiles of about 2.5 MB."""
    return (
        Matrix(tiles=5, tile_bytes=1024 * 1280 * BF16),
        *exchange,
        Matrix(tiles=20, tile_bytes=512 * 2176 * BF16),
        Matrix(tiles=8, tile_bytes=2176 * 640 * BF16),
        *exchange,
    )


def _stream_big() -> Iterator[Measurement]:
    layers, met = (_big(),) * LAYERS, (_big(ONE_ROW),) * LAYERS
    for slots, alone, with_exchanges in ((12, 24.65, 26.10), (16, 24.75, 26.21)):
        kernel = StreamKernel(layers=layers, slots={ARENA: slots})
        yield from _pair(f"C5 big, arena of {slots}", kernel, met, alone, with_exchanges)
    kernel = StreamKernel(layers=layers, slots={ARENA: 16}, dots=False)
    yield from _pair("C5 big, arena of 16, copies only", kernel, met, 24.69, 24.97)
    kernel = StreamKernel(layers=layers, copies=False)
    yield from _pair("C5 big, dots only", kernel, met, 12.67, 20.91)


def _exchanges() -> Iterator[Measurement]:
    for name, exchange, us, origin in (
        ("one shot, 1 row", ONE_ROW, 4.15, "H"),
        ("one shot, 8 rows", EIGHT_ROWS, 15.02, "H"),
        ("in 3 rounds, 1 row", in_rounds(5120 * F32, (4, 2, 1)), 6.99, "H"),
        ("in 3 rounds, 8 rows", in_rounds(8 * 5120 * F32, (4, 2, 1)), 12.56, "H"),
        ("two phases 8x8192, f32", two_phase(8, 8192, F32, 8), 9.41, "I"),
        ("two phases 8x8192, bf16", two_phase(8, 8192, BF16, 8), 7.28, "I"),
        ("two phases 64x4096, f32", two_phase(64, 4096, F32, 8), 25.44, "I"),
        ("two phases 64x4096, bf16", two_phase(64, 4096, BF16, 8), 14.45, "I"),
        ("gather 8x512 bf16", gather(8 * 512 * BF16), 3.67, "I"),
        ("gather 8x1024 bf16", gather(8 * 1024 * BF16), 3.87, "I"),
        ("gather 16x1024 bf16", gather(16 * 1024 * BF16), 4.94, "I"),
    ):
        kernel = StreamKernel(layers=((exchange,),), ranks=8)
        yield Measurement(id=f"C6 {name}", origin=origin, us=us, kernel=kernel)


def _pairs() -> Iterator[Measurement]:
    for name, distance, size, us in (
        ("sibling, 256 KiB", 1, 256 << 10, 2.60),
        ("sibling, 16 MiB", 1, 16 * MIB, 27.5),
        ("other chip, 256 KiB", 2, 256 << 10, 7.8),
        ("other chip, 16 MiB", 2, 16 * MIB, 367.0),
    ):
        exchange = Exchange(message_bytes=(size,), add_bytes=(0,), peers=((distance,),))
        kernel = StreamKernel(layers=((exchange,),), ranks=8)
        yield Measurement(id=f"C6 pair, {name}", origin="I", us=us, kernel=kernel)


NORM_US, NEXT_NORM_US = 0.41, 0.38  # published times of the decode kernel's vector stages
LINEAR_ATTENTION_US = 1.50 + 0.55  # convolution and recurrence, narrow projections
ATTENTION_US = 1.33


def _decode_layers(
    exchange: tuple[Exchange, ...], *, vector: bool = True, small: bool = False, layers: int = 64
) -> tuple[tuple[Matrix | Exchange, ...], ...]:
    """Helion's decode step: every fourth layer has full attention; the head is last."""
    stage = 1.0 if vector else 0.0

    def tiles(rows: int, columns: int, tile: tuple[int, int], vector_us: float = 0.0) -> Matrix:
        size = tile[0] * tile[1] * BF16
        count = -(-rows * columns * BF16 // size)
        return Matrix(tiles=count, tile_bytes=size, vector_us=stage * vector_us)

    wide, tall = ((256, 1280), (128, 2176)) if small else ((1024, 1280), (512, 2176))

    def layer(index: int) -> tuple[Matrix | Exchange, ...]:
        mixer_us = ATTENTION_US if index % 4 == 3 else LINEAR_ATTENTION_US
        return (
            tiles(5120, 2048, wide, NORM_US),
            tiles(768, 5120, wide, mixer_us),
            *exchange,
            tiles(5120, 4352, tall, NEXT_NORM_US),
            tiles(2176, 5120, tall),
            *exchange,
        )

    head = (tiles(5120, 32000, wide, NORM_US),)
    return (*(layer(index) for index in range(layers)), head)


def _decode() -> Iterator[Measurement]:
    alone = _decode_layers(())
    met = _decode_layers((ONE_ROW,))
    arena = {ARENA: 18}
    for name, us, kernel, launch in (
        ("no exchange, body", 1899.8, StreamKernel(layers=alone, slots=arena), False),
        ("body", 2071.7, StreamKernel(layers=met, slots=arena, ranks=8), False),
        ("no exchange, loop", 2008.8, StreamKernel(layers=alone, slots=arena), True),
        ("loop", 2102.1, StreamKernel(layers=met, slots=arena, ranks=8), True),
        (
            "consumer only, no exchange",
            1412.5,
            StreamKernel(layers=alone, slots=arena, stub_bytes=4096),
            False,
        ),
        (
            "consumer only",
            1977.8,
            StreamKernel(layers=met, slots=arena, stub_bytes=4096, ranks=8),
            False,
        ),
        (
            "dots stubbed, no exchange",
            1900.1,
            StreamKernel(layers=_decode_layers((), vector=False), slots=arena, dots=False),
            False,
        ),
        (
            "dots stubbed",
            1968.8,
            StreamKernel(
                layers=_decode_layers((ONE_ROW,), vector=False), slots=arena, dots=False, ranks=8
            ),
            False,
        ),
        (
            "small tiles in the arena",
            2705.4,
            StreamKernel(
                layers=_decode_layers((ONE_ROW,), small=True),
                slots={ARENA: 72},
                ranks=8,
                tiles_per_step=4,
            ),
            False,
        ),
    ):
        yield Measurement(
            id=f"C7 Helion decode, {name}", origin="H", us=us, kernel=kernel, launch=launch
        )
    for name, us, layers, exchange in (
        ("loop", 2328.0, 64, (ONE_ROW,)),
        ("no exchange, loop", 2291.0, 64, ()),
        ("8 layers and head, loop", 431.0, 8, (ONE_ROW,)),
    ):
        kernel = StreamKernel(
            layers=_hand_written_layers(exchange, layers), slots={ARENA: 12}, ranks=8
        )
        yield Measurement(
            id=f"C7 Inferact decode, {name}", origin="H", us=us, kernel=kernel, launch=True
        )


def _hand_written_layers(
    exchange: tuple[Exchange, ...], layers: int
) -> tuple[tuple[Matrix | Exchange, ...], ...]:
    """Inferact's decode step with its padded tiles; its vector stages were not published."""

    def layer(index: int) -> tuple[Matrix | Exchange, ...]:
        tile = (1024 * 1024 if index % 4 == 3 else 1024 * 1280) * BF16
        return (
            Matrix(tiles=10, tile_bytes=tile),
            Matrix(tiles=4, tile_bytes=768 * 1280 * BF16),
            *exchange,
            Matrix(tiles=20, tile_bytes=1024 * 1152 * BF16),
            Matrix(tiles=12, tile_bytes=768 * 1280 * BF16),
            *exchange,
        )

    head = (Matrix(tiles=125, tile_bytes=1024 * 1280 * BF16),)
    return (*(layer(index) for index in range(layers)), head)


def _others() -> Iterator[Measurement]:
    def stream(tiles: int, tile_bytes: int, push_scale: float = 1.0) -> StreamKernel:
        matrix = Matrix(tiles=tiles, tile_bytes=tile_bytes, push_scale=push_scale)
        return StreamKernel(layers=((matrix,),) * LAYERS, slots={ARENA: 12})

    head = Matrix(tiles=125, tile_bytes=5120 * 256 * BF16)
    kernel = StreamKernel(layers=((head,),), slots={ARENA: 12})
    yield Measurement(id="C8 head", origin="H", us=98.67, kernel=kernel)
    row = one_shot(4096 * F32, 8)
    attention = Matrix(tiles=5, tile_bytes=4096 * 256 * BF16)  # q, k, v and output
    mlp = Matrix(tiles=21, tile_bytes=4096 * 256 * BF16)
    kernel = StreamKernel(layers=((attention, row, mlp, row),) * LAYERS, slots={ARENA: 12}, ranks=8)
    yield Measurement(id="C9 dense, 54.5 MB", origin="H", us=16.29, kernel=kernel, per=LAYERS)
    for name, us, tiles, scale in (
        ("76 MiB bf16 layer", 25.0, 38, 1.0),
        ("400 MiB bf16 head", 128.0, 200, 1.0),
        ("200 MiB int8 head", 68.0, 100, 2.0),
    ):
        yield Measurement(
            id=f"C10 {name}",
            origin="I",
            us=us,
            kernel=stream(tiles, 2 * MIB, scale),
            per=LAYERS,
        )


UNMATCHED = (
    Unmatched(
        id="C2 ring of 4",
        us="113.2",
        reason="4 slots of 2 MiB lose 15 % here, while the same bytes in flight saturate in series "
        "C1 and a ring of 2 behaves as the model says; nothing published explains the step",
    ),
    Unmatched(
        id="C2 in a stack of 64 layers",
        us="86.8",
        reason="3.48 TB/s, above the sustained rate of every other kernel of the set",
    ),
    Unmatched(
        id="C3 body replication",
        us="2.2 to 4.7 TB/s",
        reason="contradicts the statement of the same source that unrolled dots reach 6.0 to 6.5",
    ),
    Unmatched(
        id="C5 big, rings of 4, 6 and 4",
        us="24.81, 31.22",
        reason="how the loops are split over the rings was not published",
    ),
    Unmatched(
        id="C6 hierarchical variants",
        us="4.54 to 19.89",
        reason="the steps of the algorithm were not published",
    ),
    Unmatched(
        id="C7 rings instead of an arena; big tiles without it; one device",
        us="1,896 to 3,268",
        reason="depths of the rings and how narrow operands were read were not published",
    ),
    Unmatched(
        id="C7 one rank slower",
        us="1,971 against 1,900",
        reason="unexplained where it was measured; `RankSkew` can express it",
    ),
    Unmatched(
        id="C7, C9 XLA kernels",
        us="24 to 4,117",
        reason="compiled by another compiler; no schedule was published",
    ),
    Unmatched(
        id="C8 head in tiles of 128 columns; with the embedding",
        us="153.3; 101.7",
        reason="256-byte rows stream slower, which the memory model leaves out (mkc never emits "
        "them); the embedding's copy was not described",
    ),
    Unmatched(
        id="C9 others",
        us="16.98 to 53.43",
        reason="8 layers: limited by dispatch; Gemma-like, DeepSeek-V2-Lite: bytes not published; "
        "GPT-J: 50.3 MB in 18.38 is 3.1 above its stream, cause not published",
    ),
    Unmatched(
        id="C10 int8 layer; experts; collectives; attention; whole steps",
        us="0.7 to 3,657",
        reason="int8 copies alone reach 2.7 TB/s, unexplained; payloads and tiles of the others "
        "were not published",
    ),
    Unmatched(
        id="C11, C12 rounds of speculative kernels",
        us="3,960 to 9,250",
        reason="several kernels and host glue; per-phase schedules were not published",
    ),
)
