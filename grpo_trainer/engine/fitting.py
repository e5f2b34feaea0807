"""Decide before the first step which layers are compiled, and which are recomputed: as few as memory allows."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from grpo_trainer.batch.microbatches import layout
from grpo_trainer.config.train import SPARE, TrainConfig
from grpo_trainer.engine import attention
from grpo_trainer.engine.collectives import reduced
from grpo_trainer.engine.compiled import CompiledLayers, LayerCall, compile_layers, learn
from grpo_trainer.engine.forward import Forward, build_forward
from grpo_trainer.engine.head import head_scores
from grpo_trainer.engine.recompute import (
    MEASURED,
    Kept,
    LayerMemory,
    Recomputation,
    describe,
    known_layers,
    measure,
    recompute,
)
from grpo_trainer.engine.tensor_shards import shard_of
from grpo_trainer.errors import warn_once
from grpo_trainer.memory import gathered_bytes, head_bytes, update_bytes
from grpo_trainer.model.load import freeze
from grpo_trainer.model.lora import add_adapter, use_few_kernels
from grpo_trainer.model.reference import free_bytes
from grpo_trainer.model.text_part import causal_lm_of
from grpo_trainer.phases import START

log = logging.getLogger(__name__)

AHEAD_LAYERS = 2
"""Layers that are compiled ahead. The first needs another graph if the embedding is not trained: its input has no
gradient."""
VOCABULARY = 128
"""Vocabulary of the temporary model, small because embedding and head are not compiled here."""
WORTH_COMPILING = 0.3e9
"""With `--compile auto`: least number of a model's parameters."""
LONG_RUN = 20
"""With `--compile auto`: least number of steps."""
TRIED = 148
"""Tokens of a trial pass: 4 times a prime. If a model had a dimension of this size, or of half or a quarter of it,
torch would take the number of tokens for that dimension and compile for this number only."""
NARROW_HEAD = 8
"""Columns of the head with which its functions are compiled."""


def fit(
    forward: Forward,
    config: TrainConfig,
    trained: Sequence[Parameter],
    before_measuring: Callable[[], None] = lambda: None,
    states_over: int = 1,
) -> None:
    """Compile and checkpoint a model's layers as the options say, or as the device's memory requires.

    `before_measuring` is called before the device's free memory is read, and returns when the other processes on the
    device have allocated their memory. The optimizer states of `trained` are sharded over `states_over` processes.
    """
    use_few_kernels(forward.model)
    if (layers := known_layers(forward.decoder)) is not None:
        Fitting(forward, layers, config, trained, before_measuring, states_over).fit()


@dataclass(eq=False, repr=False)
class Fitting:
    """Chooses by trial passes over a few tokens which layers are compiled and recomputed."""

    forward: Forward
    layers: nn.ModuleList
    config: TrainConfig
    trained: Sequence[Parameter]
    """The parameters whose gradients and optimizer states will take memory."""
    before_measuring: Callable[[], None] = lambda: None
    states_over: int = 1
    """As for `fit`."""

    def __post_init__(self) -> None:
        assert self.forward.decoder is not None and self.forward.head is not None, "layers are a decoder's"
        self.decoder, self.head = self.forward.decoder, self.forward.head
        self.is_sharded = isinstance(self.forward.model, FSDPModule)
        self.recomputes_in_graphs = not self.is_sharded
        """Whether compiled layers recompute inside their graphs; otherwise checkpoints around the layers do."""

    def fit(self) -> None:
        if is_compiled(self.config, self.forward.model, on_gpu=self.head.weight.is_cuda):
            self.compile()
        self._forget_gradients()
        self._set_recomputed()
        self._forget_gradients()

    def compile(self, *, head: bool = True) -> None:
        """Compile the layers, by a trial pass, and the head; compile neither if torch can't compile the layers."""
        again = self.config.gradient_checkpointing and self.recomputes_in_graphs
        planned = Recomputation(len(self.layers)) if again else None
        trial = partial(self._layer_by_layer, self._layer_calls()) if self.is_sharded else self.trial
        self.forward.compiled = compile_layers(self.layers, trial, planned)
        if self.forward.compiled is None:
            return
        self.forward.plan = self.forward.plan.compiled()
        if head:
            self._compile_head()
        log.info("decoder layers%s are compiled", " and head" if head else "")

    def trial(self) -> None:
        """Run the shortest pass, forward and backward."""
        learn(self.run(TRIED))

    def _layer_calls(self) -> list[LayerCall]:
        """Return the calls of the layers in the shortest pass, which is not compiled."""
        calls: list[LayerCall] = []

        def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(LayerCall.of(layer, args, kwargs, self.head.weight.device.type))

        hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in self.layers]
        self.run(TRIED)
        for hook in hooks:
            hook.remove()
        return calls

    def _layer_by_layer(self, calls: Sequence[LayerCall]) -> None:
        """Run the trial of a sharded model: one layer after the other, each alone.

        All processes gather a layer's weights together, so they go on or give up together. They could not give up a
        pass of the whole model.
        """
        for call in calls:
            failed = call.repeat()
            if self._largest(int(failed is not None)):
                raise failed or RuntimeError("another trainer process can't compile them")

    def _largest(self, own: int) -> int:
        """Return the largest of all processes' numbers; all call this."""
        return int(reduced(torch.tensor(own, device=self.head.weight.device), dist.ReduceOp.MAX))

    def run(self, tokens: int) -> Tensor:
        """Make a forward pass over `tokens` tokens, a multiple of 4, in two sequences as in a microbatch."""
        device = self.head.weight.device
        halves = torch.arange(tokens, device=device).remainder(len(self.head.weight)).view(2, -1)
        if not self.forward.packed:
            return self.decoder(input_ids=halves, use_cache=False).last_hidden_state
        half, quarter = tokens // 2, tokens // 4
        shared = self.forward.shared
        packed = layout([], [(half, [half + quarter] * 2)]) if shared else layout([half, half])
        arguments = attention.arguments(packed.to(device))
        return self.decoder(input_ids=halves.view(1, -1), use_cache=False, **arguments).last_hidden_state

    def measure(self) -> tuple[float, float]:
        """Return the bytes that a layer keeps for each token, and for any number of tokens."""
        with self.forward.learning():
            token, fixed = measure(self.forward.model, self.run)
        return token / len(self.layers), fixed / len(self.layers)

    def _compile_head(self) -> None:
        """Compile the head's functions by calling them as a step does, so that the first step need not.

        The compiled functions get only logits, so a narrow head suffices. The model's own may be sharded.
        """
        device, rows = self.head.weight.device, len(self.head.weight)
        weight_VH = torch.zeros(rows, NARROW_HEAD, device=device, requires_grad=self.head.weight.requires_grad)
        bias = self.head.bias
        bias_V = None if bias is None else torch.zeros(rows, device=device, requires_grad=bias.requires_grad)
        hidden_NH = torch.zeros(TRIED, NARROW_HEAD, device=device, requires_grad=True)
        targets_N = torch.zeros(TRIED, dtype=torch.int64, device=device)
        scores = head_scores(
            hidden_NH,
            weight_VH,
            bias_V,
            targets_N,
            torch.ones(TRIED, device=device),
            targets_N.new_zeros(TRIED, 0),
            self.forward.plan,
            entropy_gradient=self.config.entropy_coef > 0,
        )
        # A gradient with the strides of a loss's gradient: that of a sum has others, and torch would compile again.
        scores.logprobs_N.backward(torch.ones_like(scores.logprobs_N))

    def _forget_gradients(self) -> None:
        for parameter in self.trained:
            parameter.grad = None

    def _set_recomputed(self) -> None:
        config, count = self.config, len(self.layers)
        wanted = config.gradient_checkpointing
        if wanted is not None or not on_gpu(self.head.weight.device):
            self._keep(Recomputation(count if wanted else 0))
            return
        memory = self._measured(in_graphs=self._recomputing_layers() is not None)
        self.before_measuring()
        tokens, rest = config.largest_pass, self._room()
        finer = self._measured_between(memory, tokens, rest)
        if not self._keep(self._common(finer.plan(tokens, rest))):
            finer = self._measured(in_graphs=False)
            kept = self._keep(self._common(finer.plan(tokens, rest)))
            assert kept, "checkpoints keep all or the input"
        plan, needed = self.forward.recomputation, finer.needed(tokens, self.forward.recomputation)
        if plan.count == 0 and plan.more is Kept.ALL:
            self.forward.use_spare_memory(rest - needed)
        log.info(
            "%s: %.1f GB free for passes of %d tokens, %.0f KB a token and layer, %.1f GB left",
            *(describe(plan, count), rest / 1e9, tokens, memory.token_bytes[Kept.ALL] / 1e3, (rest - needed) / 1e9),
        )
        lacking = int(needed - rest)
        if dist.is_initialized():
            lacking = self._largest(lacking)  # rank 0 warns for the GPU that has the least room
        if lacking > 0:
            text = "a pass of %d tokens may not fit: %.1f GB are lacking; lower --max-tokens-per-microbatch"
            warn_once(log, text, tokens, lacking / 1e9)

    def _common(self, plan: Recomputation) -> Recomputation:
        """Return a plan of all processes that compute each layer together: they must recompute the same layers."""
        if shard_of(self.forward.model) is None:
            return plan
        return replace(plan, count=self._largest(plan.count))

    def _room(self) -> float:
        """Return the bytes that a pass may use."""
        device, config = self.head.weight.device, self.config
        torch.cuda.empty_cache()
        free = free_bytes(device)
        if config.trainer_memory_gb is not None:
            free = min(free, config.trainer_memory_gb * 1e9 - torch.cuda.memory_allocated(device))
        largest = max(sum(parameter.numel() for parameter in layer.parameters()) for layer in self.layers)
        together = gathered_bytes(largest, self.forward.plan.dtype.itemsize) if self.is_sharded else 0
        weight, plan = self.head.weight, self.forward.plan
        sums = (plan.sum_dtype or plan.dtype).itemsize
        sums += plan.dtype.itemsize if self.is_sharded and plan.dtype.itemsize < sums else 0  # handed over in 16 bits
        of_head = head_bytes(
            min(config.largest_pass, plan.rows(len(weight))) * len(weight),
            plan.logit_bytes,
            weight.numel(),
            item=plan.dtype.itemsize,
            weight_item=weight.itemsize,
            gradient=sums if weight.requires_grad else 0,
        )
        return (1 - SPARE) * free - held_later(self.trained, config, self.states_over) - of_head - together

    def _keep(self, plan: Recomputation) -> bool:
        """Apply a plan, and return whether that is possible: only compiled layers support `PRODUCTS` and `NARROW`."""
        count, compiled = len(self.layers), self._recomputing_layers()
        if compiled is not None:
            reason = compiled.try_out(plan, self.trial)
            if reason is not None:
                log.warning("compiled layers can't recompute: %s", reason)
                compiled.plan = Recomputation()
                compiled = None
        if compiled is None and {plan.of(number) for number in range(count)} - {Kept.ALL, Kept.INPUT}:
            return False
        recompute(self.layers, plan.count if compiled is None else 0)
        self.forward.recomputation = plan
        return True

    def _measured_between(self, memory: LayerMemory, tokens: int, rest: float) -> LayerMemory:
        """Return `memory` with `PRODUCTS` and `NARROW` measured if needed, since each takes a minute to compile."""
        compiled = self._recomputing_layers()
        if compiled is None or isinstance(self.forward.model, PeftModel):
            return memory
        for kept in (Kept.PRODUCTS, Kept.NARROW):
            plan = memory.plan(tokens, rest)
            if plan.count == 0 or plan.less < kept:
                break
            reason = compiled.try_out(Recomputation(len(self.layers), kept), self.trial)
            if reason is not None:
                log.warning("compiled layers keep all or their input: %s", reason)
                break
            token, fixed = self.measure()
            memory = replace(
                memory,
                token_bytes={**memory.token_bytes, kept: token},
                fixed_bytes={**memory.fixed_bytes, kept: fixed},
            )
        return memory

    def _recomputing_layers(self) -> CompiledLayers | None:
        """Return the compiled layers if they recompute inside their graphs, else None."""
        return self.forward.compiled if self.recomputes_in_graphs else None

    def _measured(self, *, in_graphs: bool) -> LayerMemory:
        """Measure layers that keep everything, and layers that keep only their input."""
        inputs = input_bytes(self.layers, self.run)
        token, fixed = self.measure()
        # Outside of graphs, casts of weights live until the forward pass ends, even in layers that keep only inputs.
        casts = 0.0 if in_graphs else fixed
        kept = {Kept.ALL: token, Kept.INPUT: inputs}
        return LayerMemory(len(self.layers), kept, {Kept.ALL: fixed, Kept.INPUT: casts})


def is_compiled(config: TrainConfig, model: nn.Module, *, on_gpu: bool) -> bool:
    """Return whether to compile a model's layers: as the option says, or if compiling is worth its time."""
    if config.compile != "auto":
        return config.compile == "on"
    if shard_of(model) is not None or config.load_in_4bit or not on_gpu:
        return False
    if config.routing_replay != "off":  # each microbatch has other experts, and the graph would be another
        return False
    # Qwen3_5GatedDeltaNet, KimiDeltaAttention, …: torch unrolls their loop over a sequence. Four layers took minutes.
    if any("Delta" in type(module).__name__ for module in model.modules()):
        return False
    size = sum(parameter.numel() for parameter in model.parameters())
    return size >= WORTH_COMPILING and config.training_steps >= LONG_RUN


def on_gpu(device: torch.device) -> bool:
    """Return whether the device is a GPU; only there is memory counted."""
    return device.type == "cuda"


def held_later(trained: Sequence[Parameter], config: TrainConfig, states_over: int = 1) -> float:
    """Return the bytes of gradients, optimizer states and master weights, which the first step allocates.

    For sharded weights, these are the bytes of this process's shard.
    """
    own = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in trained]
    return sum(sum(update_bytes(config, part.numel(), part.itemsize, states_over).values()) for part in own)


def input_bytes(layers: nn.ModuleList, run: Callable[[int], Tensor]) -> int:
    """Return the bytes of a layer's input for each token, which is fp32 for fp32 weights even under autocast."""
    found: list[Tensor] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])

    hook = layers[0].register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        run(MEASURED[0])
    hook.remove()
    return found[0].shape[-1] * found[0].itemsize


# ahead of the weights ------------------------------------------------------------------------------------------------


def compile_ahead(config: TrainConfig, skeleton: PreTrainedModel) -> None:
    """Compile the graphs of a model's decoder layers, if the options ask for compiled layers, while its server starts.

    torch.compile stores its graphs with the code of a layer, so all layers of one class share them. It is therefore
    enough to compile two layers with temporary weights: the model's own layers then find the graphs. The buffers of
    `skeleton`, the model without weights, are on the device.
    """
    device = next((buffer.device for buffer in skeleton.buffers()), torch.device("cpu"))
    trains_some = config.layer_indices is not None
    if trains_some or not is_compiled(config, skeleton, on_gpu=device.type == "cuda"):
        return
    try:
        with START.of("compile"), torch.random.fork_rng([device] if device.type == "cuda" else []):
            sample = _two_layers(config, skeleton, device)
            forward = build_forward(sample, config)
            use_few_kernels(sample)
            if (layers := known_layers(forward.decoder)) is not None:
                trained = [parameter for parameter in sample.parameters() if parameter.requires_grad]
                Fitting(forward, layers, config, trained).compile(head=False)
    except Exception as error:  # from models, kernels or compilers; the real layers are tried again later
        log.info("could not compile ahead of the weights: %s: %s", type(error).__name__, error)


def _two_layers(config: TrainConfig, skeleton: PreTrainedModel, device: torch.device) -> nn.Module:
    """Return a model with two such layers, random weights and a small vocabulary, and the same parts trainable."""
    found = copy.deepcopy(skeleton.config)
    text = found.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = AHEAD_LAYERS, VOCABULARY, None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:AHEAD_LAYERS]
    options = {"dtype": skeleton.dtype, "attn_implementation": config.attention}
    with torch.device(device):
        model = causal_lm_of(found, **options)
    freeze(model, config)
    if config.trains_adapter:
        return add_adapter(model, config.model_copy(update={"lora_adapter": None}), config.seed)
    return model.requires_grad_(True)
