"""A model that is cut before it has weights gets those of its files, and computes as the whole one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from grpo_trainer.alignment import proof
from grpo_trainer.alignment.proof import WeightChange
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine import fitting
from grpo_trainer.engine.forward import build_forward
from grpo_trainer.engine.recompute import Kept, LayerMemory, Recomputation
from grpo_trainer.errors import ConfigError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model.load import build_without_weights, compute_in, freeze
from grpo_trainer.parallel.shards import draw_weights, give_memory, is_sharded, read_weights, shard_model, with_rest
from grpo_trainer.parallel.strategies import Shards
from grpo_trainer.parallel.world import World
from grpo_trainer.trainer import Trainer
from tests.unit.factories import batch, refusing, sample
from vllm_server.protocol import PROOF_VERSION

CPU = torch.device("cpu")
ROLLOUTS = batch(
    [sample([5, 6], [7, 8, 9], 1.0), sample([5, 6], [9], 0.0)],
    [sample([11], [12, 13], 0.5), sample([11], [14, 15, 16, 17, 18], 1.0), sample([11], [20], 0.0)],
)
SIZES: dict[str, Any] = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
TIED = Qwen2Config(**SIZES, **HEADS, tie_word_embeddings=True)
APART = Qwen2Config(**SIZES, **HEADS, tie_word_embeddings=False)
FUSED = MixtralConfig(**SIZES, **HEADS, num_local_experts=2)  # its files hold each expert by itself


@pytest.fixture(autouse=True)
def _one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone: what is cut over it is whole, but cut."""
    meet = tmp_path_factory.mktemp("group") / "meet"
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def _second_of_two(_one_process: None) -> None:
    """A process group in which the others are but said to be there."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)


def plain(config: object) -> PreTrainedModel:
    model = build_without_weights(config, torch.float32, "sdpa", CPU)
    give_memory(model, CPU)
    draw_weights(model, seed=3)
    return model


def cut_model(
    config: object,
    world: World | None = None,
    dtype: torch.dtype = torch.float32,
    second: type[nn.Module] | None = None,
) -> PreTrainedModel:
    """`dtype` is what it computes in; `second` is the class of its second layer."""
    model = build_without_weights(config, torch.float32, "sdpa", CPU)
    if second is not None:
        model.model.layers[1].__class__ = second
    shard_model(model, world or World(), CPU, dtype)
    give_memory(model, CPU)
    return model


@pytest.mark.parametrize(
    ("config", "shard"), [(TIED, "1GB"), (APART, "20KB"), (FUSED, "1GB")], ids=["tied", "several files", "fused"]
)
def test_shards_have_their_files_weights(tmp_path: Path, config: object, shard: str) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size=shard)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert len(list(tmp_path.glob("*.safetensors"))) == (1 if shard == "1GB" else 4)
    model = cut_model(AutoConfig.from_pretrained(tmp_path))
    read_weights(model, str(tmp_path), World())
    wanted = dict(whole.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in found.items():
        assert isinstance(parameter.data, DTensor)
        assert torch.equal(parameter.data.to_local(), wanted[name]), name
    ids = torch.arange(5, 17)[None]
    assert torch.equal(model(input_ids=ids).logits, whole(input_ids=ids).logits)


def config_with(**values: object) -> TrainConfig:
    return build(TrainConfig, {"model": "x", "weight_bridge_mode": "none", "seq_len": 64, "batch_size": 4, **values})


def test_shards_are_not_counted_in_what_layers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan for a GPU, made on a CPU: its memory is what is said here."""
    monkeypatch.setattr(fitting, "on_gpu", lambda _: True)
    monkeypatch.setattr(fitting, "free_bytes", lambda _: 10**9)
    asked: list[tuple[float, float, float]] = []

    def seen(memory: LayerMemory, tokens: int, free: float) -> Recomputation:
        asked.append((memory.token_bytes[Kept.ALL], memory.fixed_bytes[Kept.ALL], free))
        return Recomputation(1)

    monkeypatch.setattr(LayerMemory, "plan", seen)
    config = config_with()
    whole, model = plain(APART), cut_model(APART)
    draw_weights(model, seed=3)
    for each in (freeze(whole, config), freeze(model, config)):
        each.requires_grad_(True)
    fitting.fit(build_forward(whole, config), config, list(whole.parameters()))
    with with_rest(model):  # type: ignore[arg-type]
        forward = build_forward(model, config)
        fitting.fit(forward, config, list(model.parameters()))
    assert forward.recomputation == Recomputation(1)
    (token_bytes, fixed_bytes, free), (of_cut, fixed_of_cut, free_for_cut) = asked
    assert (of_cut, fixed_of_cut) == (token_bytes, fixed_bytes)
    # a layer: q 32 x 32 + 32, k and v 32 x 16 + 16, o 32 x 32, three of 32 x 48, two norms of 32: 7,808 weights;
    # two and a gradient of one in float32, and the gradient that is added up: 4 x 4 bytes of each
    assert free - free_for_cut == 16 * 7808


@pytest.mark.usefixtures("_second_of_two")
def test_each_process_reads_and_draws_its_rows_and_has_memory_for_them_alone(tmp_path: Path) -> None:
    whole = plain(APART)
    save_file(dict(whole.named_parameters()), tmp_path / "model.safetensors")
    world = World(1, 2)
    drawn, read = cut_model(APART, world), cut_model(APART, world)
    draw_weights(drawn, seed=3)
    read_weights(read, str(tmp_path), world)
    for name, wanted in whole.named_parameters():
        first = -(-len(wanted) // 2)  # of 101 rows 51
        for model in (drawn, read):
            part = model.get_parameter(name).data
            assert isinstance(part, DTensor) and part.shape == wanted.shape
            assert torch.equal(part.to_local(), wanted[first:]), name
            assert part.to_local().untyped_storage().nbytes() <= 4 * wanted[:first].numel()
    layer = whole.model.layers[0]
    assert float(layer.mlp.up_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(layer.mlp.up_proj.weight, layer.mlp.gate_proj.weight)
    assert torch.equal(whole.model.norm.weight, torch.ones(32)) and not layer.self_attn.q_proj.bias.any()
    # a gradient and two states in float32, 12 bytes: of one of the two embeddings, 50 rows of 32
    assert fitting.held_later([read.get_parameter("lm_head.weight")], config_with()) == 12 * 50 * 32
    assert fitting.held_later([whole.get_parameter("lm_head.weight")], config_with()) == 12 * 101 * 32


@pytest.mark.complete
@pytest.mark.timeout(900)  # torch traces each layer, which takes minutes on a busy machine
@pytest.mark.parametrize("packing", ["on", "off"])
def test_shards_compiled_steps(packing: str, graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another process makes a pass more, and in passes whose sequences share no prompt."""
    monkeypatch.setattr(Shards, "passes", lambda _, own: own + 1)
    options = {"adam_epsilon": 1e-3, "lr": 1e-2, "gradient_checkpointing": True, "packing": packing}
    if packing == "on":
        options["max_tokens_per_microbatch"] = 7  # a pass of one sequence, and one of each group
    rows: list[dict[str, float]] = []
    for build_model, choice in ((plain, "off"), (cut_model, "on")):
        model = build_model(copy.deepcopy(APART))  # packing chooses the attention in it
        config = config_with(compile=choice, **options)
        draw_weights(model, seed=3)
        freeze(model, config).requires_grad_(True)
        trainer = Trainer(model, config)
        assert trainer.forward.plan.is_compiled == (choice == "on")
        assert (trainer.shards is None) == (choice == "off")
        graphs_before = graphs["unique_graphs"]
        for step in range(2):
            found = reduce(trainer.step(ROLLOUTS, step).metrics)
            rows.append({key: found[key] for key in ("train/loss", "train/grad_norm")})
    for plainly, compiled in zip(rows[:2], rows[2:], strict=True):
        assert compiled == pytest.approx(plainly, rel=1e-4, abs=1e-6)
    # one for all layers, also where they are computed again; two of the head
    assert graphs["unique_graphs"] == graphs_before == 3 and not counters["graph_break"]


def test_the_change_of_a_proof_is_made_in_a_shard_and_undone() -> None:
    model = cut_model(FUSED)
    draw_weights(model, seed=3)
    change = WeightChange(model, 0, lambda _: contextlib.nullcontext())
    before = own_weights(model)
    with change.made([[5, 6, 7, 8]], move=0.1):
        changed = own_weights(model)
    # In the first, middle and last layer, half of attention's first matrix and of the first expert's last one.
    rows = {name: (changed[name] != each).reshape(len(each), -1).any(1) for name, each in before.items()}
    assert {name.split(".", 3)[3] for name, of_matrix in rows.items() if of_matrix.any()} == {
        "self_attn.q_proj.weight",
        "mlp.experts.down_proj",
    }
    first = rows["model.layers.0.self_attn.q_proj.weight"]
    assert first.tolist() == [True] * (len(first) // 2) + [False] * (len(first) // 2)
    assert all(torch.equal(each, before[name]) for name, each in own_weights(model).items())


@pytest.mark.parametrize("is_common", [True, False])
def test_weight_change_is_undone_by_all_or_none(monkeypatch: pytest.MonkeyPatch, is_common: bool) -> None:
    """A process that fails alone would wait for the others, which are in another operation."""
    written: list[int] = []

    @contextlib.contextmanager
    def writing(version: int) -> Iterator[None]:
        written.append(version)
        yield

    monkeypatch.setattr(proof, "enlarge", lambda *_: None)
    model, world = cut_model(FUSED), World(0, 2)
    draw_weights(model, seed=3)
    error = MemoryError("no room")
    if is_common:
        world.common(error)
    with pytest.raises(MemoryError), WeightChange(model, 7, writing, world).made([[5, 6, 7, 8]], move=0.1):
        raise error
    assert written == [PROOF_VERSION, *([7] if is_common else [])]


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of this process's shards of the layers; a pass leaves what is outside the layers whole."""
    found = {name: each.data for name, each in model.named_parameters() if ".layers." in name}
    return {name: data.to_local().clone() for name, data in found.items() if isinstance(data, DTensor)}


@pytest.mark.complete
@pytest.mark.timeout(900)  # torch traces each layer, which takes minutes on a busy machine
def test_shards_are_compiled_before_their_first_step(graphs: Any) -> None:
    """Under autocast, too, and whether or not a layer's input and its weights have gradients."""
    config = config_with(compile="on", dtype="bfloat16", packing="off")
    model = cut_model(copy.deepcopy(APART), dtype=torch.bfloat16)
    draw_weights(model, seed=3)
    freeze(model, config).requires_grad_(True)
    compute_in(model, config)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    trainer = Trainer(model, config)
    graphs_before = graphs["unique_graphs"]
    trainer.step(ROLLOUTS, 0)
    assert graphs["unique_graphs"] == graphs_before == 2 + 3  # two of the head, and one for each kind of layer


class Uncompilable(Qwen2DecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("where", ["here", "in a later layer", "elsewhere"])
def test_shards_uncompilable(where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By all processes, if one of them can't compile it."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("uncompilable")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken if where == "here" else "eager"))
    cut = partial(cut_model, second=Uncompilable) if where == "in a later layer" else cut_model
    if where == "elsewhere":
        monkeypatch.setattr(fitting, "reduced", lambda own, _: torch.ones_like(own))
    torch._dynamo.reset()
    losses = []
    for build_model, choice in ((plain, "off"), (cut, "on")):
        model = build_model(APART)
        draw_weights(model, seed=3)
        trainer = Trainer(freeze(model, config_with()).requires_grad_(True), config_with(compile=choice))
        assert trainer.forward.compiled is None
        losses.append([reduce(trainer.step(ROLLOUTS, step).metrics)["train/loss"] for step in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-6)
    assert ("uncompilable" in caplog.text) == (where == "here")


@pytest.mark.parametrize(
    ("world", "options", "cut"),
    [
        (World(0, 2), {}, True),
        (World(0, 2), {"kl_beta": 0.1}, False),
        (World(0, 2), {"weight_bridge_mode": "lora_only"}, False),
        (World(0, 2), {"sharding": "none"}, False),
        (World(), {}, False),
    ],
)
def test_is_sharded(world: World, options: dict[str, Any], cut: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert is_sharded(world, config_with(**options)) == cut
    assert ("--kl-beta" in caplog.text) == ("kl_beta" in options)
    model = build_without_weights(APART, torch.float32, "sdpa", CPU)
    model.model.layers = nn.Sequential(*model.model.layers)  # which no one knows
    with refusing(ConfigError, "--sharding", words=["Qwen2ForCausalLM"]):
        shard_model(model, World(), CPU, torch.float32)
