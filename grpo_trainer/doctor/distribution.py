"""Do settings leave samples and trainer in one distribution (docs/sampling.md)?"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_trainer.config.run import RunConfig
from grpo_trainer.config.server import arguments
from grpo_trainer.doctor.findings import Finding, ok, warn
from grpo_trainer.doctor.model import ModelShape

NAME = "distribution"

BENDING = {
    "--logprobs-mode": "processed_logprobs",
    "--generation-config": "vllm",
    "--override-generation-config": "",
}
"""Arguments of a server that change what it samples from, or the logprobs of it; and their value that does not."""


def check_distribution(config: RunConfig, shape: ModelShape | None) -> Finding:
    """Warn of settings with which the server samples from another distribution than the trainer computes."""
    bent = list(_bent(config, shape))
    if not bent:
        return ok(NAME, "samples and trainer have the same")
    got, fixes = zip(*bent, strict=True)
    return warn(NAME, "; ".join(got), "the same distribution on both sides (docs/sampling.md)", "; ".join(fixes))


def _bent(config: RunConfig, shape: ModelShape | None) -> Iterator[tuple[str, str]]:
    """Yield what bends it, and the fix."""
    loss, vllm = config.trainer.loss, config.trainer.vllm
    if shape is not None and shape.experts and loss.routing_replay == "off":
        yield "experts that each side chooses for itself", "add --routing-replay server"
    coarse = "--load-in-4bit" if config.trainer.model.load_in_4bit else "a server in 8 bits" if vllm.in_8_bits else ""
    # For a server in 8 bits the trainer's own default is the correction.
    said = "ratio_against" in loss.model_fields_set or not vllm.in_8_bits
    if coarse and said and loss.correction == "none":
        yield f"{coarse} without a correction", "use --ratio-against trainer"
    for flag, value in arguments(vllm.extra_args):
        name = flag.replace("_", "-")
        if name in BENDING and value != BENDING[name]:
            yield f"{flag} {value}".rstrip(), f"leave {flag} out"
