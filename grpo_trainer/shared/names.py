"""Find where in vLLM's memory each parameter of a Hugging Face model lies: a pure function of names and shapes.

vLLM fuses matrices that transformers keeps separate, pads the vocabulary, and has other names for a mixture's experts:

    self_attn.q_proj, k_proj, v_proj      rows of self_attn.qkv_proj (weights and biases), in this order
    mlp.gate_proj, up_proj                rows of mlp.gate_up_proj, in this order
    embed_tokens, lm_head                 the first rows; vLLM pads to a multiple of 64
    mlp.experts.gate_up_proj, down_proj   experts[.routed_experts].w13_weight, w2_weight, `[expert, out, in]` both
    mlp (Mixtral)                         block_sparse_moe

All other parameters have the same name on both sides. Equal names and shapes do not prove an equal order of rows, so
matrices must be on a list of modules whose layout is known to be equal on both sides. A matrix that is not on the list
is refused, and so is a parameter of either side without a counterpart. The rules are those of vLLM 0.32 and
transformers 5.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from grpo_common.errors import Problem
from grpo_common.sharing import padded_vocabulary
from grpo_trainer.errors import ModelError

Shape = tuple[int, ...]

FUSED: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""vLLM's module -> the modules whose rows it holds, in order."""

EXPERTS: Final[Mapping[str, str]] = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""Fused experts: parameter in transformers -> parameter in vLLM."""

PADDED: Final = ("embed_tokens", "lm_head")

RENAMED: Final[tuple[tuple[str, str], ...]] = ((".mlp.", ".block_sparse_moe."),)
"""Part of a path -> vLLM's possible other name for it."""

ALIKE: Final = frozenset(
    {"embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"}
    | {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "fc1", "fc2", "c_fc", "c_proj", "dense"}
    | {"gate", "shared_expert_gate"}
)
"""Modules whose matrices, `[out, in]`, have the same rows on both sides. Not included are `query_key_value` and `Wqkv`,
which vLLM reorders, `kv_b_proj`, of which vLLM keeps transformed copies, and `c_attn`, which transformers transposes.
"""

_SHOWN = 12


def not_shareable(config: Mapping[str, Any]) -> str | None:
    """Return why trainer and server can't share the weights of a model with this config.json; None: names decide."""
    architecture = (config.get("architectures") or [""])[0]
    if architecture.endswith("ForConditionalGeneration"):
        return f"the place of the text part in vLLM's {architecture} is not known"
    if config.get("kv_lora_rank"):
        return (
            "latent attention (kv_lora_rank): vLLM computes with copies of kv_b_proj (W_UK, W_UV) that it makes when "
            "it loads the model, so weights that are written in place would not change its answers"
        )
    return None


class NamesError(ModelError):
    """Trainer and server have different parameters, or in a layout that is not known.

    The first problem is a summary; the others name the first few parameters.
    """


@dataclass(frozen=True)
class Facts:
    """Facts about a model that names and shapes do not show."""

    hf_ties: Mapping[str, str] = field(default_factory=dict)
    """Name of a tied parameter -> the name under which it is listed first."""
    vllm_ties: Mapping[str, str] = field(default_factory=dict)
    """The same for vLLM: several names of the same memory."""
    strange_experts: Mapping[str, str] = field(default_factory=dict)
    """Path of a module of fused experts that is not `[expert, out, in]` with gate before up -> its layout."""
    padded: Mapping[str, int] = field(default_factory=dict)
    """Name of a vocabulary's shard -> its rows in vLLM with padding; of a whole vocabulary they are known."""

    def rows_of(self, name: str, rows: int) -> int:
        """Return the rows of a vocabulary's matrix in vLLM."""
        return self.padded.get(name, padded_vocabulary(rows))


@dataclass(frozen=True, order=True)
class Binding:
    """The place of a Hugging Face parameter: `vllm_name[start : start + length]`, of this shape.

    Rows are the first dimension: outputs of a matrix, elements of a vector, experts of a mixture.
    """

    hf_name: str
    vllm_name: str
    start: int
    length: int
    shape: Shape


def bind_names(
    hf_shapes: Mapping[str, Shape], vllm_shapes: Mapping[str, Shape], facts: Facts | None = None
) -> tuple[Binding, ...]:
    """Find each parameter's place.

    The shapes are those of all parameters, and of the buffers that checkpoints hold, tied ones under each name. There
    is one binding for each parameter, tied ones under their first name, sorted by name. Together they cover all of
    vLLM's memory exactly once, except the padding of the vocabulary.

    Raises:
        NamesError: a parameter of either side can't be bound; the error lists the problems.
    """
    names = _Names(hf_shapes, vllm_shapes, facts or Facts())
    bindings: list[Binding] = []
    problems: list[Problem] = []
    for name in sorted(hf_shapes):
        if name in names.facts.hf_ties:
            problems += names.check_tie(name)
            continue
        found = names.place(name)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            bindings.append(found)
    problems += _check_cover(bindings, vllm_shapes, names)
    if problems:
        whole = Problem(
            field="--model-name",
            got=f"{len(problems)} problems",
            wanted="each parameter of both sides exactly once",
            fix="serve the model of --model-name; if shared_vllm does not know it, "
            "use --weight-bridge-mode lora_only or none",
            summary="the trainer's parameters can't be bound to vLLM's",
        )
        raise NamesError.of([whole, *problems[:_SHOWN]])
    return tuple(bindings)


@dataclass(frozen=True)
class _Names:
    hf: Mapping[str, Shape]
    vllm: Mapping[str, Shape]
    facts: Facts

    def place(self, name: str) -> Binding | Problem:
        """Return the parameter's only place, or the problem."""
        shown = f"{name} {list(self.hf[name])}"
        one = "one place in vLLM"
        candidates = {self.first(candidate): candidate for candidate in self._candidates(name)}
        if not candidates:
            return Problem(shown, "none", one)
        if len(candidates) > 1:
            return Problem(shown, f"{len(candidates)}: {', '.join(sorted(candidates.values()))}", one)
        (target,) = candidates.values()
        path, leaf = _split(name)
        if (layout := self.facts.strange_experts.get(path)) is not None:
            return Problem(shown, layout, "experts that are [expert, out, in], gate before up")
        if (
            len(self.hf[name]) > 1
            and _module(name) not in ALIKE
            and not (path.endswith(".experts") and leaf in EXPERTS)
        ):
            return Problem(shown, f"vLLM's {target}", "a module whose rows are known to have one order on both sides")
        return self._rows(name, target)

    def check_tie(self, name: str) -> Iterator[Problem]:
        """Check that vLLM either lacks a tied parameter (it uses the layer twice) or ties it too."""
        owner = self.facts.hf_ties[name]
        if self.hf[name] != self.hf[owner]:
            yield Problem(name, str(list(self.hf[name])), f"{list(self.hf[owner])}, as {owner}, to which it is tied")
        if name in self.vllm and self.first(name) not in {self.first(place) for place in self._candidates(owner)}:
            yield Problem(name, "two parameters in vLLM", f"one with {owner}, to which the trainer ties it")

    def first(self, vllm_name: str) -> str:
        return self.facts.vllm_ties.get(vllm_name, vllm_name)

    def _candidates(self, name: str) -> list[str]:
        """Return vLLM's existing names that the rules allow for a parameter."""
        paths = {name, *(name.replace(old, new) for old, new in RENAMED)}
        return [place for path in sorted(paths) for place in _possible(path) if place in self.vllm]

    def _rows(self, name: str, target: str) -> Binding | Problem:
        """Return the parameter's rows in `target`; all parts of a fused matrix must be known."""
        shape, whole = self.hf[name], self.vllm[target]
        misfit = Problem(f"{name} {list(shape)}", f"vLLM's {target} {list(whole)}", summary="does not fit")
        if not shape or len(shape) != len(whole) or shape[1:] != whole[1:]:
            return misfit
        parts = FUSED.get(_module(target), ())
        if _module(name) not in parts:
            padded = _module(name) in PADDED and whole[0] == self.facts.rows_of(name, shape[0])
            return Binding(name, target, 0, shape[0], shape) if padded or whole[0] == shape[0] else misfit
        path, leaf = _split(name)
        siblings = [f"{_split(path)[0]}.{part}.{leaf}" for part in parts]
        if missing := [sibling for sibling in siblings if sibling not in self.hf]:
            return replace(misfit, got=f"no {missing[0]}", wanted=f"all parts of vLLM's {target}")
        rows = [self.hf[sibling][0] for sibling in siblings]
        if sum(rows) != whole[0]:
            return replace(misfit, wanted=f"{' + '.join(map(str, rows))} rows, of {', '.join(parts)}")
        return Binding(name, target, sum(rows[: parts.index(_module(name))]), shape[0], shape)


def _possible(name: str) -> Iterator[str]:
    """Yield vLLM's possible names for a parameter of this (renamed) name, whether they exist or not."""
    yield name
    path, leaf = _split(name)
    parent = _split(path)[0]
    for fused, parts in FUSED.items():
        if _module(name) in parts:
            yield f"{parent}.{fused}.{leaf}"
    if path.endswith(".experts") and leaf in EXPERTS:
        yield f"{path}.{EXPERTS[leaf]}"
        yield f"{path}.routed_experts.{EXPERTS[leaf]}"


def _split(name: str) -> tuple[str, str]:
    """Split `a.q_proj.weight` into `a.q_proj` and `weight`."""
    path, _, leaf = name.rpartition(".")
    return path, leaf


def _module(name: str) -> str:
    """Return the `q_proj` of `a.q_proj.weight`."""
    return _split(_split(name)[0])[1]


def _check_cover(bindings: Collection[Binding], vllm: Mapping[str, Shape], names: _Names) -> Iterator[Problem]:
    """Check that each row of vLLM's parameters belongs to exactly one binding, except the padding of the vocabulary.

    The check does not depend on how the bindings were found.
    """
    taken: dict[str, list[Binding]] = {}
    for binding in bindings:
        taken.setdefault(names.first(binding.vllm_name), []).append(binding)
    for name, shape in sorted(vllm.items()):
        if names.first(name) != name:
            continue
        reached, owner = 0, ""
        for binding in sorted(taken.get(name, ()), key=lambda binding: binding.start):
            if binding.start < reached:
                taken_twice = f"both in rows {binding.start} to {reached} of vLLM's {name}"
                yield Problem(f"{binding.hf_name} and {owner}", taken_twice)
            if binding.start > reached:
                yield _unowned(name, shape, f"rows {reached} to {binding.start}")
            reached, owner = max(reached, binding.start + binding.length), binding.hf_name
        rows = shape[0] if shape else 1
        if reached < rows and not (_module(owner) in PADDED and rows == names.facts.rows_of(owner, reached)):
            yield _unowned(name, shape, f"rows {reached} to {rows}")


def _unowned(name: str, shape: Shape, rows: str) -> Problem:
    return Problem(f"vLLM's {name} {list(shape)}", f"no owner of {rows}", "a parameter of the trainer's")
