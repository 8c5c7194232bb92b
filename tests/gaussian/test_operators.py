"""Every operator that dropout models contain, in a small network, against sampling.

The rules have tests of their own; here it is the whole way that counts: traced, decomposed where there is no
rule, in every tier, with covariance. Inputs are Gaussian and noise is moderate, so that approximations
are good.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import momentprop as mp

FUNCTIONS = {
    # name: (function of x, shape of x without the batch)
    "add two": (lambda x: x[:, :3] + x[:, 3:], (6,)),
    "addcmul": (lambda x: torch.addcmul(x[:, :3], x[:, 3:], torch.ones(3), value=0.5), (6,)),
    "addcdiv": (lambda x: torch.addcdiv(x, x, 2 * torch.ones(6)), (6,)),
    "lerp": (lambda x: torch.lerp(x[:, :3], x[:, 3:], 0.3), (6,)),
    "mul two": (lambda x: x[:, :3] * x[:, 3:], (6,)),
    "div two": (lambda x: x[:, :3] / (4 + x[:, 3:]), (6,)),
    "reciprocal": (lambda x: 1 / (5 + x), (6,)),
    "matmul two": (lambda x: x[:, :2] @ x[:, 2:].transpose(1, 2), (4, 3)),
    "bmm": (lambda x: torch.bmm(x[:, :2], x[:, 2:].mT), (4, 3)),
    "einsum": (lambda x: torch.einsum("bij,bkj->bik", x[:, :2], x[:, 2:]), (4, 3)),
    "einsum with a constant": (lambda x: torch.einsum("bij,jk->bki", x, torch.ones(3, 2)), (4, 3)),
    "baddbmm": (lambda x: torch.baddbmm(x[:, 4:, :2], x[:, :2], x[:, 2:4].mT), (6, 3)),
    "outer": (lambda x: x[:, 2:, None] * x[:, None, :2], (4,)),
    "linalg_vector_norm": (lambda x: torch.linalg.vector_norm(x + 2, dim=-1), (8,)),
    "normalize": (lambda x: F.normalize(x + 2, dim=-1), (8,)),
    "cosine similarity": (lambda x: F.cosine_similarity(x[:, :8] + 2, x[:, 8:], -1), (16,)),
    "var": (lambda x: x.var(-1), (16,)),
    "std": (lambda x: x.std(-1, unbiased=False, keepdim=True), (16,)),
    "var_mean": (lambda x: torch.cat(torch.var_mean(x, -1, keepdim=True), -1), (16,)),
    "layer norm by hand": (lambda x: (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(), (16,)),
    "standardize by std": (lambda x: (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + 1e-5), (16,)),
    "global response norm": (
        lambda x: x * (g := x.norm(dim=(1, 2), keepdim=True)) / (g.mean(-1, True) + 1e-6) + x,
        (3, 3, 6),
    ),
    "rms norm": (lambda x: F.rms_norm(x, (8,)), (8,)),
    "layer norm": (lambda x: F.layer_norm(x, (8,)), (8,)),
    "group norm": (lambda x: F.group_norm(x, 2), (4, 8)),
    "instance norm": (lambda x: F.instance_norm(x), (3, 16)),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), (6,)),
    "softmax": (lambda x: x.softmax(-1), (6,)),
    "log_softmax": (lambda x: x.log_softmax(-1), (6,)),
    "softmax over channels": (lambda x: x.softmax(1), (5, 3)),
    "softmin": (lambda x: F.softmin(x, 1), (5, 3)),
    "maximum": (lambda x: torch.maximum(x[:, :3], x[:, 3:]), (6,)),
    "minimum": (lambda x: torch.minimum(x[:, :3], x[:, 3:]), (6,)),
    "max over a dimension": (lambda x: x.max(-1).values, (3, 4)),
    "min over a dimension": (lambda x: x.min(1).values, (4, 3)),
    "amax": (lambda x: x.amax((1, 2)), (3, 2)),
    "amin": (lambda x: x.amin(-1, keepdim=True), (3, 4)),
    "adaptive max pooling": (lambda x: F.adaptive_max_pool1d(x, 1), (3, 4)),
    "adaptive max pooling 2d": (lambda x: F.adaptive_max_pool2d(x, 2), (1, 4, 4)),
    "max pooling with indices": (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], (1, 4, 4)),
    "max unpooling": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (1, 4, 4)),
    "glu": (lambda x: F.glu(x, -1), (6,)),
    "silu of a half": (lambda x: F.silu(x[:, :3]) * x[:, 3:], (6,)),
    "geglu": (lambda x: F.gelu(x[:, :3]) * x[:, 3:], (6,)),
    "squeeze and excitation": (lambda x: x * x.mean(-1, keepdim=True).sigmoid(), (3, 8)),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), (6,)),
    "elu by hand": (lambda x: torch.where(x > 0, x, torch.expm1(x)), (6,)),
    "relu by mask": (lambda x: x * (x > 0), (6,)),
    "cumsum": (lambda x: x.cumsum(-1), (6,)),
    "cumprod": (lambda x: (1 + 0.1 * x).cumprod(-1), (4,)),
    "prod": (lambda x: (1 + 0.1 * x).prod(-1), (4,)),
    "where": (lambda x: torch.where(torch.arange(6) % 2 == 0, x, 2 * x), (6,)),
    "masked_fill": (lambda x: x.masked_fill(torch.arange(6) % 2 == 0, 0.5), (6,)),
    "gather": (lambda x: x.gather(1, torch.tensor([[0, 2]]).expand(x.shape[0], 2)), (6,)),
    "index": (lambda x: x[:, [0, 3, 3]], (6,)),
    "index_select": (lambda x: x.index_select(1, torch.tensor([4, 0])), (6,)),
    "index_add": (lambda x: torch.zeros_like(x).index_add(1, torch.tensor([1, 1, 0]), x), (3,)),
    "scatter": (
        lambda x: torch.zeros_like(x).scatter(1, torch.tensor([[2, 0, 1]]).expand(x.shape[0], 3), x),
        (3,),
    ),
    "scatter_add": (
        lambda x: torch.zeros_like(x).scatter_add(1, torch.tensor([[2, 0, 0]]).expand(x.shape[0], 3), x),
        (3,),
    ),
    "index_put": (lambda x: _written(x), (4,)),
    "roll": (lambda x: x.roll(2, 1), (6,)),
    "flip": (lambda x: x.flip(1), (6,)),
    "repeat": (lambda x: x.repeat(1, 2), (3,)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), (3,)),
    "tile": (lambda x: x.tile(2), (3,)),
    "stack": (lambda x: torch.stack([x, x.relu()], 1), (3,)),
    "hstack": (lambda x: torch.hstack([x, x.relu()]), (3,)),
    "chunk": (lambda x: torch.cat([c * i for i, c in enumerate(x.chunk(3, 1), 1)], 1), (6,)),
    "unbind": (lambda x: x.unbind(1)[0] + 2 * x.unbind(1)[1], (2, 3)),
    "split": (lambda x: torch.cat(x.split([2, 4], 1)[::-1], 1), (6,)),
    "tensor_split": (lambda x: torch.cat(x.tensor_split(2, 1)[::-1], 1), (6,)),
    "unflatten": (lambda x: x.unflatten(1, (2, 3)).mean(2), (6,)),
    "movedim": (lambda x: x.movedim(1, 2), (2, 3)),
    "swapaxes": (lambda x: x.swapaxes(1, 2), (2, 3)),
    "mT": (lambda x: x.mT, (2, 3)),
    "unfold": (lambda x: x.unfold(1, 3, 1).sum(-1), (6,)),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), (4, 2, 2)),
    "pad": (lambda x: F.pad(x, (1, 2)), (4,)),
    "reflect pad": (lambda x: F.pad(x, (1, 1), mode="reflect"), (2, 4)),
    "circular pad": (lambda x: F.pad(x, (1, 1), mode="circular"), (2, 4)),
    "replicate pad": (lambda x: F.pad(x, (1, 1), mode="replicate"), (2, 4)),
    "upsample nearest": (lambda x: F.interpolate(x, scale_factor=2), (1, 2, 2)),
    "upsample bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (1, 3, 2)),
    "upsample bicubic": (lambda x: F.interpolate(x, size=(3, 3), mode="bicubic"), (1, 4, 4)),
    "upsample area": (lambda x: F.interpolate(x, size=(2, 2), mode="area"), (1, 4, 4)),
    "local response norm": (lambda x: F.local_response_norm(x, 3), (4, 2)),
    "lp pooling": (lambda x: F.lp_pool1d(x + 3, 2, 2), (2, 4)),
    "bilinear layer": (
        lambda x: F.bilinear(x[:, :2] + 2, x[:, 2:] + 2, torch.linspace(-1, 1, 12).reshape(2, 2, 3)),
        (5,),
    ),
    "mean over all but the batch": (lambda x: x.mean((1, 2)), (2, 3)),
    "pow": (lambda x: x**2 + (3 + x) ** 0.5, (4,)),
    "base to a power": (lambda x: 2.0**x, (4,)),
    "hypot": (lambda x: (x.square() + 1).sqrt(), (4,)),
    "logaddexp": (lambda x: torch.logaddexp(x[:, :2], x[:, 2:]), (4,)),
    "euclidean distance": (lambda x: torch.cdist(x[:, :2], 3 + x[:, 2:]), (4, 3)),
    "double": (lambda x: x.double().tanh().float(), (4,)),
    "type_as": (lambda x: x.type_as(x) * 2, (4,)),
    "detach": (lambda x: x - x.mean(1, keepdim=True).detach(), (4,)),
    "contiguous": (lambda x: x.transpose(1, 2).contiguous().view(x.shape[0], -1), (2, 3)),
    "expand": (lambda x: x[:, None].expand(-1, 2, -1), (3,)),
    "diagonal": (lambda x: x.diagonal(dim1=1, dim2=2), (3, 3)),
    "trace of a matrix": (lambda x: x.diagonal(dim1=1, dim2=2).sum(-1), (3, 3)),
    "tril": (lambda x: x.tril(), (3, 3)),
    "complex rotation": (lambda x: _rotated(x), (6,)),
    "conv_transpose": (lambda x: F.conv_transpose1d(x, torch.ones(2, 1, 3) / 2, stride=2), (2, 3)),
    "fold": (lambda x: F.fold(F.unfold(x, 2), (3, 3), 2), (1, 3, 3)),
}


def _written(x):
    y = torch.zeros_like(x)
    y[:, [0, 2]] = x[:, [1, 3]] * 2
    return y


def _rotated(x):
    """Rotary position embedding, as language models have it."""
    angle = torch.arange(3) * 0.3
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return x * angle.repeat(2).cos() + turned * angle.repeat(2).sin()


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


# where parts are correlated and the diagonal does not know, only the accurate tier is compared
CORRELATED = {
    "normalize",
    "cosine similarity",
    "layer norm by hand",
    "standardize by std",
    "global response norm",
    "squeeze and excitation",
    "unbind",
    "cumprod",
    "prod",
    "detach",
    "var_mean",
    "local response norm",
    "adaptive max pooling 2d",
    "conv_transpose",
    "addcdiv",
    "pow",
    "fold",
    "bilinear layer",
    "euclidean distance",
}
LOOSE = {"var": 0.15, "std": 0.15, "var_mean": 0.15, "max unpooling": 1.0}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operator(name):
    function, shape = FUNCTIONS[name]
    torch.manual_seed(0)
    model = Model(function)
    x = mp.Moments(torch.randn(2, *shape), 0.04)
    mc = mp.monte_carlo(model, x, 4000)
    spread = mc.std > 0.03 * mc.std.max()  # others are rarely seen by sampling
    for tier in ("paper", "fast", "accurate"):
        bnn = mp.convert(model, x, tier)
        out = bnn(x)
        assert out.mean.shape == function(x.mean).shape
        assert out.mean.isfinite().all()
        assert (out.variance >= 0).all()
        assert (out.std[~spread] < 0.1 * mc.std.max()).all()
        if tier == "accurate" or (tier == "fast" and name not in CORRELATED):
            ratio, off = (out.std / mc.std)[spread], ((out.mean - mc.mean) / mc.std)[spread]
            loose = LOOSE.get(name, 0.12)
            assert (ratio - 1).abs().max() < loose
            assert off.abs().max() < loose + 4 / math.sqrt(4000)
