"""Where in vLLM's memory each parameter of a Hugging Face model lies: a pure function of names and shapes.

vLLM joins matrices that transformers keeps apart, pads the vocabulary, and calls the experts of a mixture otherwise:

    self_attn.q_proj, k_proj, v_proj      rows of self_attn.qkv_proj (weights and biases), in this order
    mlp.gate_proj, up_proj                rows of mlp.gate_up_proj, in this order
    embed_tokens, lm_head                 the first rows; vLLM pads to a multiple of 64
    mlp.experts.gate_up_proj, down_proj   experts[.routed_experts].w13_weight, w2_weight, `[expert, out, in]` both
    mlp (Mixtral)                         block_sparse_moe

Everything else bears one name on both sides. Equal names and shapes do not prove an equal order of rows, so matrices
are taken from a list of modules that both sides are known to lay out alike; what is not on it is refused, as is
whatever is left over on either side. Read from vLLM 0.25.1 and 0.32 and transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from grpo_common.errors import Problem
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
VOCABULARY_PADDING: Final = 64
"""vLLM's `DEFAULT_VOCAB_PADDING_SIZE`."""

RENAMED: Final[tuple[tuple[str, str], ...]] = ((".mlp.", ".block_sparse_moe."),)
"""Parts of a path that vLLM may call otherwise."""

ALIKE: Final = frozenset(
    {"embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"}
    | {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "fc1", "fc2", "c_fc", "c_proj"}
    | {"gate", "shared_expert_gate"}
)
"""Modules whose matrices, `[out, in]`, have the same rows on both sides. Not: `query_key_value` and `Wqkv`, which vLLM
reorders, `kv_b_proj`, of which it keeps transformed copies, and `c_attn`, which transformers holds transposed."""

_SHOWN = 12


class NamesError(ModelError):
    """Trainer and server do not have the same parameters, or not in a way that is understood.

    Its first problem is this one, the others say which parameters are concerned.
    """

    @classmethod
    def about(cls, parameters: Sequence[Problem]) -> NamesError:
        """Return the error that names the first few of these parameters, and how many there are."""
        whole = Problem(
            field="--model-name",
            got=f"{len(parameters)} problems",
            wanted="each parameter of both sides exactly once",
            fix="serve the model of --model-name; if shared_vllm does not know it, "
            "use --weight-bridge-mode lora_only or none",
            summary="the trainer's parameters can't be bound to vLLM's",
        )
        return cls.of([whole, *parameters[:_SHOWN]])


@dataclass(frozen=True)
class Facts:
    """What names and shapes do not say.

    Attributes:
        hf_ties: name of a tied parameter -> the name under which it is listed first.
        vllm_ties: the same for vLLM's: names that stand for one place in memory.
        strange_experts: path of a module of fused experts that is not `[expert, out, in]` with gate before up -> how
            it is laid out.
    """

    hf_ties: Mapping[str, str] = field(default_factory=dict)
    vllm_ties: Mapping[str, str] = field(default_factory=dict)
    strange_experts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Binding:
    """A parameter of the Hugging Face model is `vllm_name[start : start + length]`, of this shape.

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

    Args:
        hf_shapes: of all parameters, and of the buffers that checkpoints hold, tied ones under each of their names.
        vllm_shapes: of all of vLLM's parameters, tied ones under each of their names.

    Returns:
        One binding for each parameter, tied ones under their first name, sorted by name. Together they cover all of
        vLLM's memory but the padding of the vocabulary, and no place twice.

    Raises:
        NamesError: that can't be done; it lists everything that is in the way.
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
    problems += _check_cover(bindings, vllm_shapes, names.first)
    if problems:
        raise NamesError.about(problems)
    return tuple(bindings)


@dataclass(frozen=True)
class _Names:
    hf: Mapping[str, Shape]
    vllm: Mapping[str, Shape]
    facts: Facts

    def place(self, name: str) -> Binding | Problem:
        """The parameter's one place, or what is wrong."""
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
        """A tied parameter may be missing in vLLM (the layer is used twice), but not be another one there."""
        owner = self.facts.hf_ties[name]
        if self.hf[name] != self.hf[owner]:
            yield Problem(name, str(list(self.hf[name])), f"{list(self.hf[owner])}, as {owner}, to which it is tied")
        if name in self.vllm and self.first(name) not in {self.first(place) for place in self._candidates(owner)}:
            yield Problem(name, "two parameters in vLLM", f"one with {owner}, to which the trainer ties it")

    def first(self, vllm_name: str) -> str:
        return self.facts.vllm_ties.get(vllm_name, vllm_name)

    def _candidates(self, name: str) -> list[str]:
        """All of vLLM's names that the rules allow for it and that exist."""
        paths = {name, *(name.replace(old, new) for old, new in RENAMED)}
        return [place for path in sorted(paths) for place in _possible(path) if place in self.vllm]

    def _rows(self, name: str, target: str) -> Binding | Problem:
        """Where in `target` the parameter's rows begin; of a fused matrix all parts must be known."""
        shape, whole = self.hf[name], self.vllm[target]
        misfit = Problem(f"{name} {list(shape)}", f"vLLM's {target} {list(whole)}", summary="does not fit")
        if not shape or len(shape) != len(whole) or shape[1:] != whole[1:]:
            return misfit
        parts = FUSED.get(_module(target), ())
        if _module(name) not in parts:
            padded = _module(name) in PADDED and whole[0] == _padded(shape[0])
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
    """What vLLM may call a parameter of this (renamed) name, whether it has it or not."""
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
    """`a.q_proj.weight` is `a.q_proj` and `weight`."""
    path, _, leaf = name.rpartition(".")
    return path, leaf


def _module(name: str) -> str:
    """The `q_proj` of `a.q_proj.weight`."""
    return _split(_split(name)[0])[1]


def _padded(rows: int) -> int:
    return -(-rows // VOCABULARY_PADDING) * VOCABULARY_PADDING


def _check_cover(
    bindings: Collection[Binding], vllm: Mapping[str, Shape], first: Callable[[str], str]
) -> Iterator[Problem]:
    """All rows of vLLM's parameters belong to exactly one binding, but for the padding of the vocabulary.

    Independent of how the bindings were found.
    """
    taken: dict[str, list[Binding]] = {}
    for binding in bindings:
        taken.setdefault(first(binding.vllm_name), []).append(binding)
    for name, shape in sorted(vllm.items()):
        if first(name) != name:
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
        if reached < rows and not (_module(owner) in PADDED and rows == _padded(reached)):
            yield _unowned(name, shape, f"rows {reached} to {rows}")


def _unowned(name: str, shape: Shape, rows: str) -> Problem:
    return Problem(f"vLLM's {name} {list(shape)}", f"no owner of {rows}", "a parameter of the trainer's")
