"""Where vLLM keeps each parameter: against what vLLM reported of ten architectures, and against every kind of mistake.

`tests/golden/*.json` hold vLLM 0.32's names and shapes, and where each parameter was found in its memory by content.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_common.errors import Problem
from grpo_trainer.shared.names import Binding, Facts, NamesError, Shape, bind_names
from tests.golden.models import CONFIGS, golden, random_model

ARCHITECTURES = sorted(CONFIGS)


@functools.cache
def own(architecture: str) -> tuple[dict[str, Shape], dict[str, str]]:
    """Shapes of transformers' parameters, and their ties."""
    model = random_model(architecture)
    shapes, ties, first = {}, {}, {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shapes[name] = tuple(parameter.shape)
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return shapes, ties


def bound(architecture: str) -> tuple[Binding, ...]:
    shapes, ties = own(architecture)
    record = golden(architecture)
    return bind_names(shapes, record.vllm, Facts(ties, record.ties))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter_is_bound_where_its_content_was_found(architecture: str) -> None:
    shapes, ties = own(architecture)
    found = golden(architecture).found
    bindings = bound(architecture)
    assert [binding.hf_name for binding in bindings] == sorted(shapes.keys() - ties.keys()) == sorted(found)
    for binding in bindings:
        assert (binding.vllm_name, binding.start) in found[binding.hf_name]
        assert (binding.length, *binding.shape[1:]) == binding.shape == shapes[binding.hf_name]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_of_vllms_memory_is_bound_but_for_the_vocabularys_padding(architecture: str) -> None:
    record = golden(architecture)
    sizes = {name: torch.Size(shape).numel() for name, shape in record.vllm.items() if name not in record.ties}
    places = {record.ties.get(binding.vllm_name, binding.vllm_name) for binding in bound(architecture)}
    covered = sum(torch.Size(binding.shape).numel() for binding in bound(architecture))
    heads = [name for name in sizes if "embed_tokens" in name or "lm_head" in name]
    assert places == set(sizes)
    # 98 tokens are padded to 128, in a hidden size of 128; a head's bias has one value for each
    assert sum(sizes.values()) - covered == sum((128 - 98) * sizes[name] // 128 for name in heads)


@pytest.mark.parametrize(
    "fault", ["not in vLLM", "not in the trainer", "twice in vLLM", "twice in the trainer", "another shape"]
)
@given(st.data())
def test_names_refuse_whatever_does_not_fit(fault: str, data: st.DataObject) -> None:
    """The parameter, or the place in vLLM's memory, is named."""
    architecture = data.draw(st.sampled_from(ARCHITECTURES))
    (ours, ties), record = own(architecture), golden(architecture)
    theirs, their_ties = record.vllm, record.ties
    match fault:
        case "not in vLLM":
            dropped = data.draw(st.sampled_from(sorted(theirs.keys() - their_ties.keys())))
            gone = {dropped, *(name for name, first in their_ties.items() if first == dropped)}
            theirs = {name: shape for name, shape in theirs.items() if name not in gone}
            their_ties = {name: first for name, first in their_ties.items() if name not in gone}
            named = [binding.hf_name for binding in bound(architecture) if binding.vllm_name in gone]
        case "not in the trainer":
            lost = data.draw(st.sampled_from(bound(architecture)))
            ours = {name: shape for name, shape in ours.items() if name != lost.hf_name and name not in ties}
            ties, named = {}, [their_ties.get(lost.vllm_name, lost.vllm_name)]
        case "another shape":
            name = data.draw(st.sampled_from(sorted(ours.keys() - ties.keys())))
            dimension = data.draw(st.integers(0, len(ours[name]) - 1))
            by = data.draw(st.sampled_from([-1, 1]))
            changed = [size + by * (at == dimension) for at, size in enumerate(ours[name])]
            # A vocabulary that is one token larger fits into the same padding, which configurations tell apart.
            if dimension == 0 and ("embed_tokens" in name or "lm_head" in name):
                changed[0] = 129
            ours, named = {**ours, name: tuple(changed)}, [name]
        case _:  # under another name, or as another layer's
            names = theirs if fault == "twice in vLLM" else ours
            name = data.draw(st.sampled_from(sorted(names.keys() - ties.keys() - their_ties.keys())))
            twins = [f"twin.{name}", name.replace("layers.1.", "layers.2."), f"{name}_2"]
            twin = data.draw(st.sampled_from([each for each in twins if each != name]))
            theirs = {**theirs, twin: names[name]} if fault == "twice in vLLM" else theirs
            ours = ours if fault == "twice in vLLM" else {**ours, twin: names[name]}
            named = [twin]
    with pytest.raises(NamesError) as caught:
        bind_names(ours, theirs, Facts(ties, their_ties))
    said = [str(problem) for problem in caught.value.problems]
    assert named and all(any(name in each for each in said) for name in named)


def refused(ours: Mapping[str, Shape], theirs: Mapping[str, Shape], facts: Facts | None = None) -> Problem:
    """What is wrong with the first parameter that is in the way."""
    with pytest.raises(NamesError) as caught:
        bind_names(ours, theirs, facts)
    assert "lora_only" in caught.value.fix
    return caught.value.problems[1]


def test_names_refuse_a_head_that_only_one_side_ties_or_lacks() -> None:
    (shapes, ties), record = own("llama"), golden("llama")
    assert ties == record.ties | {"lm_head.weight": "model.embed_tokens.weight"}
    problem = refused(shapes, record.vllm, Facts(ties, {}))
    assert problem.field == "lm_head.weight" and "model.embed_tokens.weight" in problem.wanted
    problem = refused(shapes, record.vllm, Facts({}, record.ties))
    assert set(problem.field.split()) >= {"model.embed_tokens.weight", "lm_head.weight"} and "0 to 98" in problem.got
    headless = {name: shape for name, shape in record.vllm.items() if name != "lm_head.weight"}
    assert bind_names(shapes, headless, Facts(ties, {})) == bound("llama")
    problem = refused(shapes, headless, Facts({}, {}))
    assert (problem.field, problem.got) == ("lm_head.weight [98, 128]", "none")


def test_only_vocabularies_are_padded_and_only_to_the_next_64() -> None:
    def bind(name: str, rows: int, theirs: int) -> tuple[Binding, ...]:
        return bind_names({name: (rows, 8)}, {name: (theirs, 8)})

    assert bind("model.embed_tokens.weight", 100, 128) == (
        Binding("model.embed_tokens.weight", "model.embed_tokens.weight", 0, 100, (100, 8)),
    )
    assert bind("lm_head.weight", 128, 128)[0].length == 128
    for name, rows, theirs in [("lm_head.weight", 64, 128), ("lm_head.weight", 100, 192), ("a.o_proj.weight", 60, 64)]:
        problem = refused({name: (rows, 8)}, {name: (theirs, 8)})
        assert problem.field == f"{name} [{rows}, 8]" and problem.got.endswith(f"{name} [{theirs}, 8]")


@pytest.mark.parametrize("module", ["attention.query_key_value", "attn.c_attn", "self_attn.kv_b_proj", "attn.Wqkv"])
def test_matrices_whose_rows_vllm_may_order_otherwise_are_refused(module: str) -> None:
    name = f"model.layers.0.{module}.weight"
    problem = refused({name: (8, 8)}, {name: (8, 8)})
    assert problem.got.endswith(name) and "order" in problem.wanted


def test_experts_that_are_laid_out_otherwise_are_refused_though_their_shapes_fit() -> None:
    """64 intermediate and 128 hidden: `[expert, 128, 128]` both ways."""
    shapes, ties = own("qwen3_moe")
    record = golden("qwen3_moe")
    path = "model.layers.0.mlp.experts"
    assert shapes[f"{path}.gate_up_proj"] == (4, 128, 128)
    problem = refused(shapes, record.vllm, Facts(ties, record.ties, {path: "transposed"}))
    assert problem.field.startswith(f"{path}.down_proj ") and problem.got == "transposed"


def test_names_refuse_a_part_of_a_fused_matrix_alone_and_two_possible_places() -> None:
    problem = refused({"a.gate_proj.weight": (4, 8)}, {"a.gate_up_proj.weight": (8, 8)})
    assert problem.field == "a.gate_proj.weight [4, 8]"
    assert problem.got == "no a.up_proj.weight" and problem.wanted.endswith("a.gate_up_proj.weight")
    theirs = {"a.qkv_proj.weight": (12, 8), "a.q_proj.weight": (4, 8)}
    problem = refused({f"a.{part}_proj.weight": (4, 8) for part in "qkv"}, theirs)
    assert problem.got == "2: a.q_proj.weight, a.qkv_proj.weight" and problem.field.startswith("a.q_proj.weight")


def test_the_error_lists_the_first_and_counts_all() -> None:
    with pytest.raises(NamesError) as caught:
        bind_names({f"norm{number:02}.weight": (4,) for number in range(30)}, {})
    counted, *listed = caught.value.problems
    assert counted.got.startswith("30 ")
    assert [problem.field for problem in listed] == [f"norm{number:02}.weight [4]" for number in range(12)]
