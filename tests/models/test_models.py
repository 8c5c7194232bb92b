"""Public networks convert, and their spread is close to sampling; benchmarks/zoo.py has the numbers.

Without further options only networks that together take a minute run; `pytest -m zoo` runs the others.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from catalogue import ZOO
from momentprop.capture.records import flatten_output
from momentprop.capture.signature import split_inputs
from momentprop.moments import is_moments
from zoo import load

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # raised inside the packages while they import or build
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

# networks that run by default: a few seconds each at most, one or two of every kind
CI: tuple[str, ...] = (
    "plain_selu_alpha_dropout",
    "plain_drop_connect",
    "plain_gaussian_dropout",
    "plain_drop_path_div",
    "plain_drop_path_floor",
    "plain_tanh_gelu_written_out",
    "plain_many_activations",
    "plain_layer_drop_mlp",
    "plain_lstm_classifier",
    "plain_gru_cell_loop",
    "plain_temporal_convolutions",
    "plain_encoder_padding_mask",
    "plain_transformer_seq2seq",
    "plain_cross_attention",
    "plain_swiglu_rms_transformer",
    "plain_patch_transformer",
    "plain_unet_transposed_area",
    "plain_unet_bilinear",
    "plain_squeeze_excitation",
    "plain_segnet",
    "plain_wide_resnet",
    "plain_global_response_norm",
    "plain_volumes_3d",
    "plain_group_norm_cnn",
    "transformers_bert_sdpa",
    "transformers_bert_eager",
    "transformers_albert",
    "transformers_deberta_v2",
    "transformers_bart",
    "transformers_gpt2_cache",
    "transformers_llama",
    "transformers_t5",
    "transformers_vit",
    "transformers_convnextv2",
    "transformers_segformer",
    "transformers_wav2vec2",
    "transformers_whisper",
    "transformers_patchtst",
    "monai_UNet",
    "monai_DenseNet121",
    "monai_FullyConnectedNet",
    "monai_ViT",
    "torchvision_googlenet",
    "torchvision_vit",
    "timm_convnext_atto",
)

# not converted, or not close to sampling
OPEN: tuple[str, ...] = (
    "transformers_fnet",  # Fourier transforms have no rule
    "transformers_longformer",  # branches on the values of its mask: no static graph
    "transformers_efficientnet",  # an average over windows far larger than the image: out of memory
    "torchvision_maxvit",  # stochastic depth before layer norm: std 1.2 of that sampled, mean 0.3 std off
    "timm_mobilenetv3_small_100",  # rare large jumps (kurtosis 45): std 0.75 of that sampled
)


def parameters() -> list[Any]:
    names = [name for name in ZOO if name not in OPEN]
    return [pytest.param(name, marks=() if name in CI else pytest.mark.zoo) for name in names]


def moments_of(output: Any) -> list[mp.Moments]:
    """All moments of an output, in the order of its structure."""
    if is_moments(output):
        return [output]
    parts = (
        output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    )
    return [moments for part in parts for moments in moments_of(part)]


def tensors_of(model: nn.Module, inputs: Any) -> tuple[list[Tensor], type]:
    args, kwargs = split_inputs(inputs)
    with torch.no_grad():
        output = model(*args, **kwargs)
    return [leaf for leaf in flatten_output(output)[0] if isinstance(leaf, Tensor)], type(output)


@pytest.mark.parametrize("name", parameters())
def test_public_network(name: str) -> None:
    """Structure as in eval mode, finite, no negative variance; where outputs are few, std as sampled."""
    needs = ZOO[name].needs
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed; it comes with the extras models and vision-models")
    model, inputs = load(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.FidelityNote)
        bnn = mp.convert(model, inputs)
    args, kwargs = split_inputs(inputs)
    with torch.no_grad():
        out = bnn(*args, **kwargs)
    plain, kind = tensors_of(model, inputs)
    found = moments_of(out)
    assert isinstance(out, kind) or kind is Tensor
    assert [m.mean.shape for m in found] == [m.variance.shape for m in found] == [t.shape for t in plain]
    for moments in found:
        assert moments.mean.isfinite().all()
        assert moments.variance.isfinite().all()
        assert (moments.variance >= 0).all()
    if bnn.fidelity == "accurate":
        assert 0.75 < median_ratio(bnn, inputs, found) < 1.33


def median_ratio(bnn: mp.BayesianNetwork, inputs: Any, found: list[mp.Moments]) -> float:
    """Standard deviation over that of 100 samples, whose own error is 7 %, at the median over outputs."""
    sampled = moments_of(mp.monte_carlo(bnn, inputs, n_samples=100))
    std, mc_std = (torch.cat([m.std.flatten() for m in group]) for group in (found, sampled))
    random = mc_std > 1e-3 * mc_std.max()
    return float((std[random] / mc_std[random]).median())
