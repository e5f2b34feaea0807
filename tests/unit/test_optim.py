"""Steps land: what is smaller than the spacing of 16-bit weights is not lost, on average nothing is added to it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import Parameter

from grpo_trainer.config.train import OptimizerConfig
from grpo_trainer.optim import adamw
from grpo_trainer.optim.adamw import AdamW, pieces, round_stochastically
from grpo_trainer.optim.eight_bits import BLOCK, Scaled, decoded, encoded, levels_of, recoded
from grpo_trainer.optim.steps import changed_fraction, learning_rate, sampled

SIZE = 4096
OPTIMIZERS = ("adamw", "adamw_8bit")
ALL = pytest.mark.parametrize("name", OPTIMIZERS)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def weight(value: float, dtype: torch.dtype = torch.bfloat16, shape: Sequence[int] = (SIZE,)) -> Parameter:
    return Parameter(torch.full(tuple(shape), value, dtype=dtype))


def made(name: str, parameters: Sequence[Parameter], *, master_weights: bool = False, **options: float) -> AdamW:
    config = OptimizerConfig.model_validate({"optimizer": name, "lr": 1e-5, **options})
    return AdamW(parameters, config, master_weights=master_weights)


def step(optimizer: AdamW, parameters: Sequence[Parameter], gradients: Sequence[torch.Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype).clone()
    optimizer.prepare()
    optimizer.step()


# ---------------------------------------------------------------- rounding


def test_round_stochastically_is_right_on_average_and_exact_where_bfloat16_is() -> None:
    special = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf"), 1e-40, 3e38]).bfloat16()
    for values in (torch.randn(10_000).bfloat16(), special):
        for _ in range(5):
            assert torch.equal(round_stochastically(values.float()), values)
    for bits in (0x7FC00000, 0x7FFFFFFF, -1):  # adding to the last two's would carry out of them
        assert round_stochastically(torch.full((64,), bits, dtype=torch.int32).view(torch.float32)).isnan().all()
    values = torch.randn(200) * torch.logspace(-6, 3, 200)
    tries = torch.stack([round_stochastically(values).double() for _ in range(2000)])
    spacing = 2.0 ** (values.abs().log2().floor() - 7)
    # a step of the spacing with probability p has a standard deviation of at most half of it
    allowed = 5 * 0.5 * spacing.double() / math.sqrt(2000)
    assert ((tries.mean(0) - values.double()).abs() <= allowed).all()


# ---------------------------------------------------------------- landing


@ALL
@pytest.mark.parametrize(("shape", "dtype"), [((SIZE,), torch.bfloat16), ((64, 64), torch.float32)])
def test_adamw_small_steps_move_bfloat16_as_far_as_they_should(
    name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """With gradients in either dtype."""
    # With a gradient of 1 at each step every one of these optimizers takes steps of exactly lr: 25 of them are 2.5e-4.
    # Each rounding has a standard deviation of at most half the spacing, and 25 x 4096 of them are independent.
    parameter = weight(0.02, shape=shape)
    parameter.grad_dtype = dtype
    start = float(parameter.detach().double().mean())
    optimizer = made(name, [parameter])
    for _ in range(25):
        parameter.grad = torch.ones(shape, dtype=dtype)
        optimizer.step()
    moved = start - float(parameter.detach().double().mean())
    deviation = 0.5 * (2**-6 / 128) * math.sqrt(25 / SIZE)
    assert abs(moved - 25e-5) < 5 * deviation + 0.01 * 25e-5  # and 1 % for moments in 8 bits
    assert parameter.dtype == torch.bfloat16


@ALL
def test_adamw_master_weights_move_as_far_exactly_and_parameters_are_their_nearest(name: str) -> None:
    parameter = weight(0.02)
    start = parameter.detach().float().clone()
    optimizer = made(name, [parameter], master_weights=True)
    for _ in range(25):
        step(optimizer, [parameter], [torch.ones(SIZE)])
    master = optimizer.state[parameter]["master"]
    torch.testing.assert_close(start - master, torch.full((SIZE,), 25e-5), rtol=0.01, atol=0)
    assert torch.equal(parameter, master.bfloat16()) and not torch.equal(parameter.float(), start)
    size = sum(value.nbytes for value in optimizer.state[parameter].values() if isinstance(value, Tensor)) / SIZE
    # 4 bytes of the master; fp32 moments: 2 x 4; 8 bits and a 4-byte scale for 256: 2 x (1 + 1/64)
    assert size - 4 == {"adamw": 8.0, "adamw_8bit": 2 + 1 / 32}[name], "as documented"


def run(optimizer: torch.optim.Optimizer, parameter: Parameter, steps: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.1 + 0.02
        optimizer.step()
    return parameter.detach().clone()


CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, adam_beta2=0.95)
CONFIG_8 = CONFIG.model_copy(update={"optimizer": "adamw_8bit"})
BOTH = pytest.mark.parametrize("config", [CONFIG, CONFIG_8], ids=OPTIMIZERS)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's compiler but for its code generator."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    counters["stats"].clear()


@pytest.mark.parametrize("in_two_parts", [True, False])
@pytest.mark.parametrize("shape", [(), (25,), (70, 33), (3, 50, 33)])
def test_adamw_is_torchs(shape: Sequence[int], in_two_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "PIECE", 1000)  # in pieces that do not fit evenly
    start = torch.randn(shape)
    theirs = Parameter(start.clone())
    ours = Parameter(start.clone())
    wanted = run(torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8), theirs)
    optimizer = AdamW([ours], CONFIG, in_two_parts=in_two_parts)
    assert optimizer.prepares == in_two_parts
    torch.testing.assert_close(run(optimizer, ours), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("in_two_parts", [True, False])
def test_adamw_in_one_part_and_in_two_load_each_others_states(in_two_parts: bool) -> None:
    first, second = (Parameter(torch.ones(70, 33)) for _ in range(2))
    saved = AdamW([first], CONFIG, in_two_parts=in_two_parts)
    loaded = AdamW([second], CONFIG, in_two_parts=not in_two_parts)
    second.data.copy_(run(saved, first, 3))
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    torch.testing.assert_close(run(loaded, second, 3), run(saved, first, 3), rtol=1e-5, atol=1e-7)


def test_8_bit_adamw_is_near_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "PIECE", 1000)
    start = torch.randn(70, 32)  # 24 rows are three blocks
    exact, rough = Parameter(start.clone()), Parameter(start.clone())
    moved = run(AdamW([exact], CONFIG), exact) - start
    moved_8 = run(AdamW([rough], CONFIG_8), rough) - start
    assert float((moved_8 - moved).norm() / moved.norm()) < 0.05


@BOTH
@pytest.mark.usefixtures("compiling")
def test_adamw_compiled_is_the_same(config: OptimizerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph does for all steps, and for pieces of any size."""
    monkeypatch.setattr(adamw, "PIECE", 250)  # four times that, compiled
    start = torch.randn(70, 32)
    plain, compiled = Parameter(start.clone()), Parameter(start.clone())
    wanted = run(AdamW([plain], config, in_two_parts=True), plain)
    optimizer = AdamW([compiled], config, in_two_parts=True)
    optimizer.compile()
    assert next(piece.numel() for piece in optimizer.pieces(compiled)) > 250
    torch.testing.assert_close(run(optimizer, compiled), wanted, rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1


@BOTH
@pytest.mark.usefixtures("compiling")
def test_adamw_compiled_for_all_shapes(config: OptimizerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "PIECE", 2048)  # the first two are updated together
    shapes = [(512,), (16, 32), (1280,), (64, 32), (70, 33), (3, 30, 40)]
    parameters = [Parameter(torch.randn(shape, dtype=torch.bfloat16)) for shape in shapes]
    optimizer = AdamW(parameters, config)
    optimizer.compile()
    step(optimizer, parameters, [torch.ones_like(parameter) for parameter in parameters])
    assert counters["stats"]["unique_graphs"] == 1


@ALL
@pytest.mark.parametrize("joined", [True, False])
def test_adamw_writes_views_of_another_engines_memory_in_its_second_part(
    name: str, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a fused matrix, and halves of stacked experts, which are no contiguous memory; and nothing else."""
    if not joined:  # each is too large to be updated together with others
        monkeypatch.setattr("grpo_trainer.optim.adamw.PIECE", 1024)
    fused, experts = torch.zeros(96, 32).bfloat16(), torch.zeros(4, 64, 32).bfloat16()
    rows, halves = Parameter(fused[32:64]), Parameter(experts[:, 32:])
    assert not halves.is_contiguous()
    optimizer = made(name, [rows, halves], lr=1e-2)
    rows.grad, halves.grad = torch.randn(32, 32).bfloat16(), torch.randn(4, 32, 32).bfloat16()
    places = rows.data_ptr(), halves.data_ptr()
    optimizer.prepare()
    assert not fused.any() and not experts.any(), "the first part writes nothing"
    optimizer.step()
    assert fused[32:64].all() and not fused[:32].any() and not fused[64:].any()
    assert experts[:, 32:].all() and not experts[:, :32].any()
    assert (rows.data_ptr(), halves.data_ptr()) == places and rows.grad is None and halves.grad is None
    assert [0 < each.numel() <= halves.numel() for each in sampled([halves])] == [True]


@ALL
@pytest.mark.parametrize("master_weights", [False, True])
def test_adamw_saved_and_loaded_goes_on_bit_for_bit(name: str, master_weights: bool) -> None:
    straight = Parameter(torch.randn(70, 33).bfloat16())
    gradients = [torch.randn(70, 33) for _ in range(6)]

    def steps(optimizer: AdamW, parameter: Parameter, some: Sequence[Tensor]) -> None:
        for gradient in some:
            step(optimizer, [parameter], [gradient])

    first = made(name, [straight], master_weights=master_weights, lr=1e-3)
    steps(first, straight, gradients[:3])
    saved, resumed = copy.deepcopy(first.state_dict()), Parameter(straight.detach().clone())
    generator = torch.get_rng_state()
    steps(first, straight, gradients[3:])
    second = made(name, [resumed], master_weights=master_weights, lr=1e-3)
    second.load_state_dict(saved)
    torch.set_rng_state(generator)
    steps(second, resumed, gradients[3:])
    assert torch.equal(straight, resumed)
    floats = [v.dtype for v in second.state[resumed].values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    assert set(floats) <= {torch.float32}


def test_adamw_kinds_of_states() -> None:
    """States of another kind have another name; fp32 parameters need no master weights, float16 ones do."""
    kinds = [made(name, [weight(1.0)], master_weights=m).kind for name in OPTIMIZERS for m in (False, True)]
    assert len({*kinds, "adamw"}) == 5
    assert made("adamw", [weight(1.0, torch.float32)], master_weights=True).kind == "adamw"
    assert {AdamW([weight(1.0, torch.float32)], CONFIG, in_two_parts=two).kind for two in (False, True)} == {"adamw"}
    with pytest.raises(TypeError, match=r"torch\.float16.*--master-weights"):
        made("adamw", [weight(1.0, torch.float16)])
    made("adamw", [weight(1.0, torch.float16)], master_weights=True)


# ---------------------------------------------------------------- 8 bits


@pytest.mark.parametrize("signed", [True, False])
def test_8_bits_keep_values_over_seven_decades(signed: bool) -> None:
    values = torch.logspace(-6, 0, 1000) * (torch.randn(1000).sign() if signed else 1.0)
    levels, midpoints = levels_of(signed, values.device)
    codes, scales = encoded(values, midpoints)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, (1000,), (4,))
    back = decoded(codes, scales, levels)
    assert float(((back - values) / values).abs().mean()) < (0.06 if signed else 0.03)
    # a block's largest value is kept, a negative one to 1 %: there is a code for 1, none for -1
    ends = torch.tensor([255, 511, 767, 999])
    torch.testing.assert_close(back[ends], values[ends], rtol=0.01, atol=0)
    assert not decoded(*encoded(torch.zeros(300), midpoints), levels).any()


@pytest.mark.parametrize("shape", [(25,), (100, 6), (3, 50, 12)])
def test_blocks_of_pieces_are_those_of_the_whole(shape: tuple[int, ...]) -> None:
    """However long pieces are: so a state made with one length can be read with another."""
    for limit in (16, 40, 10_000):
        parts = list(pieces(torch.zeros(shape), limit, 8))
        assert sum(-(-part.numel() // 8) for part in parts) == math.prod(shape[:-2]) * -(-math.prod(shape[-2:]) // 8)


@ALL
@pytest.mark.parametrize("master_weights", [False, True])
def test_small_parameters_together_end_as_each_alone(name: str, master_weights: bool) -> None:
    """Where rounding draws no lots: fp32, or weights kept in fp32 as well; one has no gradient now and then."""
    shapes = [(2, BLOCK), (BLOCK // 2, 1, 4), (BLOCK,), (3, 7), (4, BLOCK // 2), (1, 2, BLOCK)]
    dtype = torch.bfloat16 if master_weights else torch.float32
    starts = [torch.randn(shape).to(dtype) for shape in shapes]
    made_of = partial(AdamW, config={"adamw": CONFIG, "adamw_8bit": CONFIG_8}[name], in_two_parts=True)
    together = [Parameter(start.clone()) for start in starts]
    alone = [Parameter(start.clone()) for start in starts]
    optimizer = made_of(together, master_weights=master_weights)
    others = [made_of([each], master_weights=master_weights) for each in alone]
    for number in range(4):
        for index, (one, other) in enumerate(zip(together, alone, strict=True)):
            gradient = None if (number, index) in ((1, 1), (2, 4)) else torch.randn(one.shape).to(dtype)
            one.grad, other.grad = gradient, None if gradient is None else gradient.clone()
        optimizer.step()
        for each in others:
            each.step()
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)


# 8 bits whose rows go to other processes -----------------------------------------------------------------------------


Shape = tuple[int, ...]
HALF_A_STEP = 0.9 / 64 / 2 + 1e-5
"""Of the largest value of a block; smaller ones are off by less, at most half of themselves but for the smallest."""


def written(values: Tensor, writers: int, *, signed: bool) -> tuple[Tensor, list[Scaled]]:
    """Codes of all rows, end to end, and each writer's scales, as its optimizer has them."""
    midpoints = levels_of(signed, values.device)[1]
    codes, known, first = [], [], 0
    for rows in values.chunk(writers):
        matrices = rows.flatten(0, -3) if rows.ndim > 2 else rows[None]
        parts = [encoded(matrix.flatten(), midpoints) for matrix in matrices]
        codes += [part for part, _ in parts]
        known.append(Scaled(torch.cat([scales for _, scales in parts]), tuple(rows.shape), first))
        first += rows.numel()
    return torch.cat(codes), known


def read(codes: Tensor, scales: Tensor, shape: Shape, *, signed: bool) -> Tensor:
    levels, _ = levels_of(signed, codes.device)
    matrix = math.prod(shape[-2:])
    parts = zip(codes.split(matrix), scales.split(-(-matrix // BLOCK)), strict=True)
    return torch.cat([decoded(*part, levels) for part in parts]).view(shape)


shapes = st.one_of(
    st.tuples(st.integers(1, 900)),
    st.tuples(st.integers(1, 9), st.integers(1, 700)),
    st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 30)),
)


@given(shape=shapes, writers=st.integers(1, 4), readers=st.integers(1, 4), signed=st.booleans(), seed=st.integers(0, 9))
def test_recoded_is_within_a_step(shape: Shape, writers: int, readers: int, signed: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape[0], generator=generator).view(
        -1, *(1,) * (len(shape) - 1)
    )
    values = values if signed else values.abs()
    codes, known = written(values, writers, signed=signed)
    parts = [read(codes[part.first : part.end], part.scales, part.shape, signed=signed) for part in known]
    before = torch.cat([part.flatten() for part in parts]).view(shape)
    first = 0
    for rows in values.chunk(readers):
        own, mine = slice(first, first + rows.numel()), tuple(rows.shape)
        got = read(*recoded(codes[own], known, mine, first, signed=signed), mine, signed=signed)
        wanted = before.flatten()[own].view(mine)
        largest = wanted.abs().max()
        assert ((got - wanted).abs() <= HALF_A_STEP * largest).all()
        assert ((got - wanted).abs() <= 0.5 * wanted.abs() + 1e-6 * largest).all()
        first += rows.numel()


@pytest.mark.parametrize("shape", [(8, 256), (1024,), (6, 128, 6), (4, 3, 100)])
@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (4, 2)])
def test_recoded_changes_nothing_where_blocks_begin_where_they_did(shape: Shape, writers: int, readers: int) -> None:
    torch.manual_seed(0)
    codes, known = written(torch.randn(shape), writers, signed=True)
    scales = torch.cat([each.scales for each in known])
    found, first = [], 0
    for rows in torch.zeros(shape).chunk(readers):
        own = slice(first, first + rows.numel())
        found.append(recoded(codes[own], known, tuple(rows.shape), first, signed=True))
        first += rows.numel()
    for parts, whole in zip(zip(*found, strict=True), (codes, scales), strict=True):
        assert torch.equal(torch.cat(parts), whole)
    empty = recoded(codes[:0], known, (0, *shape[1:]), first, signed=True)  # of a process without rows
    assert [len(each) for each in empty] == [0, 0]


# around a step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "warmup", "wanted"),
    [
        ("constant", 0, [1, 1, 1]),
        ("constant", 4, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),  # never 0
        ("linear", 2, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),  # 0 just after the last step
        # 0.5 (1 + cos(0)) = 1, cos(pi/4), cos(pi/2), cos(3pi/4)
        ("cosine", 0, [1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rate_and_changed_fraction(schedule: str, warmup: int, wanted: list[float]) -> None:
    config = OptimizerConfig.model_validate({"lr": 1.0, "warmup_steps": warmup, "lr_schedule": schedule})
    rates = [learning_rate(config, step, len(wanted)) for step in range(len(wanted))]
    assert rates == pytest.approx(wanted, abs=1e-6)
    parameters = [weight(1.0, torch.float32, (10,)), weight(1.0, torch.bfloat16, (30,))]
    before = sampled(parameters)
    parameters[0].data[:4] = 2.0
    assert changed_fraction(before, sampled(parameters)) == 4 / 40
