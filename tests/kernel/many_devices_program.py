"""What the process of `test_mixtures.test_many_devices` runs: one step on 32 devices."""

from __future__ import annotations

from tests.kernel.harness import Subject
from tests.kernel.test_mixtures import MANY
from tests.kernel.test_mixtures import check_step
from tests.kernel.test_mixtures import traced
from tests.passes.kimi import small_config


def many_subject() -> Subject:
    """A layer of delta attention and one of latent attention with MXFP4 experts, whose sizes are
    divided by 32."""
    config = small_config(layers=2, latent=[2], dense=1, mxfp4=True)
    text = config["text_config"]
    text |= {"vocab_size": 4096, "attn_res_block_size": 1, "moe_intermediate_size": 256}
    text |= {"num_attention_heads": MANY, "num_key_value_heads": MANY, "qk_rope_head_dim": 32}
    text["linear_attn_config"]["num_heads"] = MANY
    return traced("many", config, heads=MANY)


def main() -> None:
    run = check_step(many_subject(), MANY)
    (plan,) = run.session.program.experts
    assert 1 < plan.groups < MANY, "no rank shares a group with some others only"
    kinds = {one.kind for one in run.session.program.exchanges}
    assert "two_step" in kinds, kinds
    print(f"{MANY} ranks agree")


if __name__ == "__main__":
    main()
