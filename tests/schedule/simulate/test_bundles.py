"""Reading the compiler's listings, in the form that libtpu 0.0.52 writes them."""

from __future__ import annotations

from pathlib import Path

from mkc.schedule.simulate.bundles import Latencies
from mkc.schedule.simulate.bundles import bundle_costs
from mkc.schedule.simulate.bundles import latencies
from mkc.schedule.simulate.bundles import marked_phases
from mkc.schedule.simulate.bundles import phase_cycles

CHAINS = """
New basic block in region: region1 {members=4 hlo=kernel parent=0}
  Length to end: 160, %1 = vld [vmem:%s1]
  Length to end: 159, %2 = vadd.xlane.f32.xlu0 %1
  Length to end: 18, %3 = vpop.xlane.xlu0 %2
  Length to end: 17, %4 = vrsqrt.f32.pop %3
  Length to end: 6, %5 = vmul.f32 %4, %1

New basic block in region: region2 {members=4 hlo=kernel parent=0}
  Length to end: 9, %6 = vadd.xlane.f32.xlu1 %1
  Length to end: 5, %7 = vadd.xlane.f32.xlu1 %5
"""

STRAIGHT = """
  0x10   : > { %90 = vtrace 3087007746 /* TraceMeStart(p02) [ */ }
  0x11   : > { %v1_v1 = vld [vmem:[#allocation1] sm:$0xff]  ;;  %s2_s1 = sld [smem:[#allocation2]] }
  0x12   : > { %3 = vadd.xlane.f32.xlu0 %v1_v1 }
  0x13   : > { %v4_v2 = vmul.f32 %v1_v1, %v1_v1 }
  0x14   : > { %v5_v3 = vpop.xlane.xlu0 %3 }
  0x15   : > { %6 = vst [vmem:[#allocation3] sm:$0xff] /*vst_source=*/%v5_v3 }
  0x16   :  { %91 = vtrace 3355443202 /* ] TraceMeEnd(p02) */ }
  0x17   : > { %v8_v1 = vld [vmem:[#allocation1] sm:$0xff] }
"""

LOOPS = """
   0x1   : > { %90 = vtrace 1 /* TraceMeStart(p03) [ */ }
   0x2   : > { %s1_s1 = smov.u32 0 }
   0x3 LB: >> { %s2_s2 = sphi %s1_s1, %s9_s2 /* phi copy */ }
   0x4 LB: >>> { %10 = vmatpush1.bf16.msra.mxu0 %v3_v2  ;;  %11 = vmatpush1.bf16.msra.mxu1 %v4_v2 }
   0x5   : >>> { %12 = vmatmul.mubr.bf16.vlgmr.msra.gmra.mrb[0].mxu0 %v5_v9 }
   0x6   : >>> { %v13_v1 = vpop.f32.mrb[1].mxu0 }
   0x7   : >> { %s9_s2 = sadd.s32 1, %s2_s2 }
   0x8 LB: >> { %s20_s1 = sphi 0, %s21_s1 }
   0x9   :  { %99 = vtrace 2818572390 }
   0xa   : > { %s30_s1 = smov.u32 1 }
   0xb   : > { %91 = vtrace 2 /* ] TraceMeEnd(p03) */ }
"""

OUTERMOST = """
   0x1   :  { %90 = vtrace 1 /* TraceMeStart(p05) [ */ }
   0x2   :  { %s1_s1 = smov.u32 0 }
   0x3   :  { %99 = vtrace 2818572390 }
   0x4 LB: > { %s2_s2 = sphi %s1_s1, %s9_s2 /* phi copy */ }
   0x5   :  { %98 = vtrace 2818572391 }
   0x6   :  {}
   0x7   : > { %s9_s2 = sadd.s32 1, %s2_s2 }
   0x8   :  { %s20_s1 = smov.u32 1 }
   0x9   :  { %s30_s1 = smov.u32 1 }
   0xa   :  { %s31_s1 = smov.u32 1 }
   0xb LB: > { %s32_s2 = sphi %s1_s1, %s9_s2 /* phi copy */ }
   0xc   :  { %s33_s1 = smov.u32 1 }
   0xd   :  { %91 = vtrace 2 /* ] TraceMeEnd(p05) */ }
   0xe   :  { %s40_s1 = smov.u32 1 }
"""

MESSAGES = """
  0x10   : > { %90 = vtrace 1 /* TraceMeStart(p04) [ */ }
  0x11   : > { %s1_s1 = sadd.s32 1, %s9_s9 }
  0x12   : > { %2 = dma.general /*src=*/%s1_s1, /*size_in_granules=*/64 /* vmem-to-vmem */ }
  0x13   : > { %s3_s3 = sadd.s32 2, %s9_s9 }
  0x14   : > { %s4_s4 = sadd.s32 3, %s9_s9 }
  0x15   : > { %5 = dma.general /*src=*/%s3_s3, /*size_in_granules=*/64 /* vmem-to-vmem */ }
  0x16   : > { %6 = dma.done.wait [#allocation1], 128 }
  0x17   : > { %v7_v1 = vld [vmem:[#allocation1] sm:$0xff] }
  0x18   : > { %8 = dma.general /*src=*/%s4_s4, /*size_in_granules=*/64 /* vmem-to-vmem */ }
  0x19   : > { %9 = dma.general /*src=*/%s4_s4, /*size_in_granules=*/64 /* vmem-to-hbm */ }
  0x1a   : > { %91 = vtrace 2 /* ] TraceMeEnd(p04) */ }
"""

KNOWN = Latencies(
    result={"vadd.xlane.f32": 141, "vmatmul.mubr.bf16.vlgmr.msra.gmra.mrb": 211, "vld": 1},
    interval={"vadd.xlane.f32": 4},
)


def test_latencies_come_from_the_chains() -> None:
    found = latencies([CHAINS])
    assert found.of("vadd.xlane.f32.xlu0") == 141
    assert found.between("vadd.xlane.f32.xlu1") == 4
    assert found.of("vrsqrt.f32") == 11
    assert found.of("vsomething.new") == 2


def test_a_bundle_waits_for_its_operands() -> None:
    """Five bundles; the sum over lanes of the second is popped 141 cycles after it."""
    (phase,) = phase_cycles(STRAIGHT, KNOWN).values()
    assert phase.bundles == 5
    assert phase.cycles == 1 + 141 + 2 + 1  # the pop, its normal latency, the store
    assert phase.loops == ()


def test_code_between_the_starts_of_messages_is_the_targets_to_time() -> None:
    """Nine bundles in ten cycles: the third start stands behind a wait, the last is no message."""
    (phase,) = phase_cycles(MESSAGES, KNOWN).values()
    assert (phase.bundles, phase.messages) == (9, 3)
    apart = phase_cycles(MESSAGES.replace("vmem-to-vmem", "vmem-to-hbm"), KNOWN)["p04"]
    assert apart.cycles - phase.cycles == 3


def test_bundles_outside_the_markers_belong_to_no_phase() -> None:
    assert list(marked_phases(STRAIGHT)) == ["p02"]
    assert len(marked_phases(STRAIGHT)["p02"]) == 5


def test_code_that_no_loop_encloses_is_not_in_the_loop_before_it() -> None:
    """Bundles without a mark within the first loop are: more of that loop follows."""
    phase = phase_cycles(OUTERMOST, KNOWN)["p05"]
    assert phase.bundles == 2 + 3 + 1
    assert [one.bundles for one in phase.loops] == [4, 1]


def test_loops_are_measured_by_themselves() -> None:
    """Two outer loops, the first with an inner one that waits for the matrix unit."""
    phase = phase_cycles(LOOPS, KNOWN)["p03"]
    assert phase.bundles == 2
    first, second = phase.loops
    assert (first.bundles, second.bundles) == (2, 2)  # the profiler's bundle is in the second
    (inner,) = first.loops
    assert inner.pushes == 2
    assert inner.cycles == 1 + 211 + 1
    assert (phase.pushes, first.pushes) == (0, 0)


def test_a_busy_cross_lane_unit_delays_the_next_sum() -> None:
    sums = "".join(f"  0x{i:x}   : > {{ %{i} = vadd.xlane.f32.xlu0 %v99_v1 }}\n" for i in (1, 2, 3))
    code = "  0x0   : > { TraceMeStart(p01) }\n" + sums + "  0x9   : > { TraceMeEnd(p01) }\n"
    assert phase_cycles(code, KNOWN)["p01"].cycles == 4 + 4 + 1


def test_taking_a_result_does_not_wait_for_the_unit() -> None:
    code = """
  0x0   : > { TraceMeStart(p01) }
  0x1   : > { %1 = vadd.xlane.f32.xlu0 %v99_v1 }
  0x2   : > { %2 = vadd.xlane.f32.xlu0 %v98_v1 }
  0x3   : > { %v3_v1 = vpop.xlane.xlu0 %77 }
  0x4   : > { TraceMeEnd(p01) }
"""
    assert phase_cycles(code, KNOWN)["p01"].cycles == 4 + 1 + 1


def test_the_files_of_a_dump(tmp_path: Path) -> None:
    (tmp_path / "17-kernel_r16.1-72-final_bundles.txt").write_text(STRAIGHT)
    (tmp_path / "17-kernel_r16.1-71-schedule-analysis_final_bundles.txt").write_text("nothing")
    (tmp_path / "17-kernel_r16.1-25-critical-path.txt").write_text(CHAINS)
    (phase,) = bundle_costs(tmp_path, "kernel_r16").values()
    assert phase.cycles == 1 + 141 + 1 + 1  # here the listing says that a pop takes one cycle
    assert bundle_costs(tmp_path, "another") == {}
