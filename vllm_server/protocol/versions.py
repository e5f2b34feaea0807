"""The version of vLLM, names of the policy's versions, and ranks of adapters."""

from typing import Final

VLLM_RUN: Final = "0.32"
"""The version of vLLM that this project was run with. Older ones are refused, newer ones cause a warning."""

DEFAULT_LORA_NAME: Final = "policy"
DEFAULT_KEEP_VERSIONS: Final = 4

SPARE_ADAPTERS: Final = 4
"""Slots besides those of kept versions: for the adapter being loaded, and for old versions that still have in-flight
requests."""

LEGAL_LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as `--max-lora-rank`; adapters of any rank up to it can be loaded."""

HIGHEST_VERSION: Final = 2**53
"""Every JSON reader represents numbers up to this one exactly."""

LONGEST_NAME: Final = 256
"""Limit of an adapter's name, in characters."""

PROOF_VERSION: Final = -1
"""Version of shared weights while a trainer proves that the server sees its writes: they are not a policy's."""


def version_name(lora_name: str, version: int) -> str:
    """Return the adapter's name for a policy version: `version_name("policy", 3) == "policy-v3"`."""
    return f"{lora_name}-v{version}"


def parse_version(name: str, lora_name: str) -> int | None:
    """Return the version in a name made by `version_name`, or None for any other name."""
    number = name.removeprefix(f"{lora_name}-v")
    if number == name or not (number.isascii() and number.isdigit() and len(number) <= 18):
        return None
    version = int(number)
    return version if version_name(lora_name, version) == name else None  # "policy-v03" names no version


def servable_rank(rank: int) -> int:
    """Return the smallest legal `--max-lora-rank` that holds adapters of `rank`.

    Raises:
        ValueError: no legal rank is large enough.
    """
    for legal in LEGAL_LORA_RANKS:
        if 1 <= rank <= legal:
            return legal
    ranks = ", ".join(map(str, LEGAL_LORA_RANKS))
    raise ValueError(f"LoRA rank: got {rank}, wanted 1 to {LEGAL_LORA_RANKS[-1]} (served as {ranks}); choose one")
