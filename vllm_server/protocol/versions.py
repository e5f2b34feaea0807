"""Names of the policy's versions, and ranks of adapters."""

from typing import Final

DEFAULT_LORA_NAME: Final = "policy"
DEFAULT_KEEP_VERSIONS: Final = 4

LEGAL_LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `--max-lora-rank`; an adapter of any rank up to it can be loaded."""

HIGHEST_VERSION: Final = 2**53
"""Up to here every reader of JSON has the number exactly."""

LONGEST_NAME: Final = 256
"""Characters of an adapter's name."""

PROOF_VERSION: Final = -1
"""What shared weights count as while a trainer proves that the server sees its writes: they are no policy's."""


def version_name(lora_name: str, version: int) -> str:
    """The adapter's name in the server for one policy version: `version_name("policy", 3) == "policy-v3"`."""
    return f"{lora_name}-v{version}"


def parse_version(name: str, lora_name: str) -> int | None:
    """The version in a name made by `version_name`, or None if it is no such name of this `lora_name`."""
    number = name.removeprefix(f"{lora_name}-v")
    if number == name or not (number.isascii() and number.isdigit() and len(number) <= 18):
        return None
    version = int(number)
    return version if version_name(lora_name, version) == name else None  # "policy-v03" is no version's name


def servable_rank(rank: int) -> int:
    """The smallest legal `--max-lora-rank` that holds adapters of `rank`.

    Raises:
        ValueError: no legal rank is large enough.
    """
    for legal in LEGAL_LORA_RANKS:
        if 1 <= rank <= legal:
            return legal
    ranks = ", ".join(map(str, LEGAL_LORA_RANKS))
    raise ValueError(f"LoRA rank: got {rank}, wanted 1 to {LEGAL_LORA_RANKS[-1]} (served as {ranks}); choose one")
