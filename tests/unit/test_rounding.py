"""The trainer's linear layers in fp8, by values computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from grpo_trainer.alignment.rounding import computed_in_fp8, rounded

ROWS = torch.tensor([[448.0, 17.0], [0.0, -896.0]])


def test_a_number_is_rounded_to_three_bits_after_the_leading_one() -> None:
    largest = torch.tensor(448.0)  # the greatest number of e4m3: the scale is 1
    assert rounded(torch.tensor([448.0, 17.0, 18.9, -300.0, 0.0]), largest).tolist() == [448.0, 16.0, 18.0, -288.0, 0.0]


def test_the_scale_makes_the_largest_number_the_greatest_of_fp8() -> None:
    assert rounded(torch.tensor([896.0, 34.0]), torch.tensor(896.0)).tolist() == [896.0, 32.0]
    each_row = ROWS.abs().amax(-1, keepdim=True)
    assert rounded(ROWS, each_row).tolist() == [[448.0, 16.0], [0.0, -896.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    assert rounded(torch.zeros(2, dtype=dtype), torch.zeros(1, dtype=dtype)).tolist() == [0.0, 0.0]


class Model(nn.Module):
    """A linear layer, an adapter's, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lora_A, self.lm_head = (nn.Linear(2, 1, bias=False) for _ in range(3))
        for each in (self.layer, self.lora_A, self.lm_head):
            each.weight.data = torch.tensor([[448.0, 17.0]])

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def test_activations_have_a_scale_a_token_and_only_linear_layers_of_the_base_model_are_rounded() -> None:
    model, tokens = Model(), torch.tensor([[448.0, 17.0], [0.0, 34.0]])
    exact = [448.0 * 448 + 17 * 17, 34.0 * 17]
    with torch.no_grad(), computed_in_fp8(model):
        # the second token's scale is its own: 34 is its greatest number, which is exact
        assert model.layer(tokens)[:, 0].tolist() == pytest.approx([448.0 * 448 + 16 * 16, 34.0 * 16])
        for other in (model.lora_A, model.lm_head):
            assert other(tokens)[:, 0].tolist() == exact
    assert model.layer(tokens)[:, 0].tolist() == exact
