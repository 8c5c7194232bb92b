"""A rule of your own, in a few lines: sine, which has exact Gaussian moments.

For X ~ N(m, v), E[exp(iX)] = exp(im - v/2) gives

    E[sin X]   = exp(-v/2) sin m
    E[sin^2 X] = (1 - exp(-2v) cos 2m) / 2

The covariance of outputs needs to know how the operator acts on deviations: as a gain dE[sin X]/dm, plus
noise for the rest of the variance. `elementwise=True` would find the same gain by differentiation.
"""

import torch
from torch import nn

import momentprop as mp


@mp.rule(
    torch.ops.aten.sin.default,
    exactness="exact for Gaussian inputs",
    reference="characteristic function",
    override=True,
)
def sin(x: mp.Moments) -> mp.Propagated:
    mean = torch.exp(-x.variance / 2) * torch.sin(x.mean)
    second = (1 - torch.exp(-2 * x.variance) * torch.cos(2 * x.mean)) / 2
    variance = (second - mean**2).clamp_min(0)
    gain = torch.exp(-x.variance / 2) * torch.cos(x.mean)
    noise = (variance - gain**2 * x.variance).clamp_min(0)
    return mp.Propagated(mp.Moments(mean, variance), lambda: mp.scaled(gain, noise))


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.Linear(64, 64), Sine(), nn.Linear(64, 1))
    x = torch.randn(5, 8)
    ours = mp.convert(model, x)(x).detach()
    mc = mp.monte_carlo(model, x, n_samples=20_000)
    print(" ours: mean, std   MC, T = 20,000: mean, std")
    for row in zip(ours.mean[:, 0], ours.std[:, 0], mc.mean[:, 0], mc.std[:, 0], strict=True):
        print("  {:+.3f}  {:.3f}          {:+.3f}  {:.3f}".format(*(float(v) for v in row)))
