"""Does a model's name mean anything: here, or on the hub?"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from grpo_common.models import WANTED, find_folder, missing_path, models_below
from grpo_trainer.doctor.findings import Finding, fail, ok, warn
from grpo_trainer.errors import ModelError

HUB_SECONDS = 5.0
"""Time limit of each request to the hub. It is short, because some machines have no connection to the hub."""

log = logging.getLogger(__name__)


def refuse_missing(name: str) -> None:
    """Say before anything loads that a model is neither here nor on the hub; warn when the hub can't be asked.

    Raises:
        ModelError: no folder is there, or the hub knows no such model or does not let us have it.
    """
    if (problem := missing_path(name)) is not None:
        raise ModelError.of([replace(problem, field="--model-name")])
    if find_folder(name) is not None:
        return
    found = ask_hub(name)
    if found.status == "fail":
        raise ModelError(field="--model-name", got=found.got, wanted=found.wanted, fix=found.fix)
    if found.status == "warn":
        log.warning("--model-name: %s; %s", found.got, found.fix)


def check_name(name: str) -> Finding:
    """Return whether the model is on this machine, or else what the hub says."""
    if (problem := missing_path(name)) is not None:
        return fail("model", f"{problem.got}: {problem.summary}", problem.wanted, problem.fix)
    if (folder := find_folder(name)) is not None:
        return ok("model", str(folder))
    return ask_hub(name)


def ask_hub(name: str) -> Finding:
    """Return what the hub says of a name; that it can't be reached is a warning."""
    from huggingface_hub import model_info
    from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    below = models_below(Path())
    here = f"; models in this folder: {', '.join(map(str, below))}" if below else ""
    try:
        model_info(name, timeout=HUB_SECONDS)
    except GatedRepoError:
        fix = f"accept its terms at https://huggingface.co/{name}, then `hf auth login`"
        return fail("model", f"{name}: the hub gives it only to who accepted its terms", "a model you may have", fix)
    except (RepositoryNotFoundError, HFValidationError):
        fix = "correct --model-name; for a private model, `hf auth login`" + here
        return fail("model", f"{name}: no folder here, and no model on the hub", WANTED, fix)
    except OfflineModeIsEnabled:
        fix = "correct --model-name; or download it first where the hub can be reached (unset HF_HUB_OFFLINE)" + here
        return fail("model", f"{name}: no folder here, and none in the hub's cache", WANTED, fix)
    except Exception as error:  # its HTTP client, and so its errors' type, differs between releases
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        got = f"{name} is not on this machine, and the hub can't be asked for it: {reason}"
        return warn(
            "model", got, "the model here, or a hub that answers", f"download it first: hf download {name}{here}"
        )
    return ok("model", f"{name} is on the hub; the run downloads it when it starts")
