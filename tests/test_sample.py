"""The oracle against a plain loop of forward passes, and its promises."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import momentprop as mp
from momentprop.sample import _SAMPLERS


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.Dropout2d(0.3),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16, 3),
    ).eval()


def loop(model: nn.Module, x: Tensor, n_samples: int) -> Tensor:
    """MC dropout as users write it."""
    model.train()
    with torch.no_grad():
        samples = torch.stack([model(x) for _ in range(n_samples)])
    model.eval()
    return samples


def assert_agree(mc: mp.SampledMoments, samples: Tensor) -> None:
    """Within 5 standard errors of the difference, element by element."""
    n = len(samples)
    mean_error = (samples.var(0) / n + mc.mean_error**2).sqrt()
    assert ((mc.mean - samples.mean(0)).abs() <= 5 * mean_error + 1e-7).all()
    assert ((mc.variance - samples.var(0)).abs() <= 5 * 1.5 * mc.variance_error + 1e-7).all()


@pytest.mark.parametrize("samples_at_once", [None, 1, 7])
def test_agrees_with_a_plain_loop(samples_at_once: int | None) -> None:
    model, x = network(), torch.randn(5, 2, 6, 6)
    mc = mp.monte_carlo(model, x, n_samples=1500, samples_at_once=samples_at_once)
    assert mc.n_samples == 1500
    assert_agree(mc, loop(model, x, 1500))


def test_statistics_are_those_of_the_samples() -> None:
    mc = mp.monte_carlo(network(), torch.randn(4, 2, 6, 6), n_samples=101, samples_at_once=8)
    samples = mc.samples.double()
    assert samples.shape == (101, 4, 3)
    torch.testing.assert_close(mc.mean.double(), samples.mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(mc.variance.double(), samples.var(0), atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(mc.std, mc.variance.sqrt())
    torch.testing.assert_close(mc.mean_error.double(), samples.std(0) / 101**0.5, atol=1e-6, rtol=1e-5)
    centred = samples - samples.mean(0)
    fourth = (centred**4).mean(0)
    expected = ((fourth - 98 / 100 * samples.var(0) ** 2) / 101).sqrt()
    torch.testing.assert_close(mc.variance_error.double(), expected, atol=1e-7, rtol=1e-4)


def test_standard_errors_are_honest() -> None:
    """Over many seeds the mean's deviation, in standard errors, has spread one."""
    model = nn.Sequential(nn.Dropout(0.4), nn.Linear(8, 1, bias=False)).double()
    x = torch.ones(1, 8, dtype=torch.float64)
    bnn = mp.convert(model, x, fidelity="fast")
    truth = bnn(x)  # one linear layer: exact
    z = torch.stack(
        [
            (m.mean - truth.mean) / m.mean_error
            for m in (mp.monte_carlo(bnn, x, 50, seed=s) for s in range(400))
        ]
    )
    assert 0.9 < z.std() < 1.15


def test_reproducible_and_no_global_state() -> None:
    model, x = network(), torch.randn(3, 2, 6, 6)
    state = torch.get_rng_state()
    first = mp.monte_carlo(model, x, n_samples=20, seed=3)
    torch.manual_seed(99)
    second = mp.monte_carlo(model, x, n_samples=20, seed=3)
    assert torch.equal(first.samples, second.samples)
    assert not torch.equal(first.samples, mp.monte_carlo(model, x, n_samples=20, seed=4).samples)
    torch.set_rng_state(state)
    mp.monte_carlo(model, x, n_samples=20)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_deterministic_prefix_runs_once() -> None:
    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        convolutions = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.convolutions += "convolution" in str(func)
            return func(*args, **(kwargs or {}))

    bnn = mp.convert(network(), torch.zeros(2, 2, 6, 6))
    with Counting() as counting:
        mp.monte_carlo(bnn, torch.randn(2, 2, 6, 6), n_samples=30, samples_at_once=3)
    assert counting.convolutions == 1


def test_samples_are_streamed_when_not_kept() -> None:
    model, x = network(), torch.randn(3, 2, 6, 6)
    streamed = mp.monte_carlo(model, x, n_samples=40, keep_samples=False)
    kept = mp.monte_carlo(model, x, n_samples=40, keep_samples=True)
    assert torch.equal(streamed.mean, kept.mean)
    with pytest.raises(mp.MomentpropError, match="keep_samples=True"):
        _ = streamed.samples


def test_masks_shared_by_the_batch() -> None:
    """Dropped weights: one mask per pass, shared by the batch and fresh in every sample."""

    class DropConnect(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 50))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, F.dropout(self.weight, 0.5, self.training))

    mc = mp.monte_carlo(DropConnect(), torch.ones(4, 50), n_samples=200, samples_at_once=100)
    assert (mc.samples == mc.samples[:, :1]).all()  # the batch shares its mask
    assert mc.samples[:, 0].unique().numel() > 10
    assert_agree(mc, loop(DropConnect(), torch.ones(4, 50), 2000))


def test_batch_sizes_used_as_numbers_and_merged_dimensions() -> None:
    class Reshapes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[0]
            offset = torch.arange(n, dtype=x.dtype)[:, None, None]
            y = F.dropout(x, 0.3, self.training).reshape(n * 3, 4)
            return (y.reshape(n, 3, 4) + offset).transpose(0, 1)

    model, x = Reshapes(), torch.rand(5, 3, 4)
    mc = mp.monte_carlo(model, x, n_samples=2000, samples_at_once=9)
    assert mc.mean.shape == (3, 5, 4)
    assert_agree(mc, loop(model, x, 2000))
    torch.testing.assert_close(mp.convert(model, x)(x).variance, x.transpose(0, 1) ** 2 * 0.3 / 0.7)


class Noise(nn.Module):
    """Every kind of noise, each in an output of its own."""

    def forward(self, x: Tensor) -> list[Tensor]:
        keep = torch.bernoulli(x.new_full((x.shape[0], 1, 1), 0.7), 0.7)
        return [
            F.alpha_dropout(x, 0.3, True),
            F.feature_alpha_dropout(x, 0.3, True),
            x * keep / 0.7,
            x * torch.bernoulli(x.sigmoid()),
            x * (1 + 0.5 * torch.randn_like(x)),
            x + torch.randn(x.shape[0], 1, 1),
            x * torch.rand_like(x) + torch.rand(x.shape[1:]),
            torch.normal(x, 0.3) + torch.normal(0.5, x.abs()),
            torch.normal(1.0, 2.0, x.shape) * x,
        ]


def test_every_kind_of_noise() -> None:
    """Against a plain loop; and independent of how samples are batched."""
    model, x = Noise(), torch.randn(3, 2, 4)
    together = mp.monte_carlo(model, x, n_samples=3000, samples_at_once=500)
    alone = mp.monte_carlo(model, x, n_samples=20, samples_at_once=1)
    plain = [torch.stack(draws) for draws in zip(*[model(x) for _ in range(3000)], strict=True)]
    for mc, few, samples in zip(together, alone, plain, strict=True):
        torch.testing.assert_close(mc.samples[:20], few.samples)
        assert_agree(mc, samples)
    stacked = together[1].samples  # one mask per channel
    assert ((stacked == stacked.amin(-1, keepdim=True)).all(-1) | (stacked != stacked[..., :1]).any(-1)).all()


def test_noise_of_recurrent_layers() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0][:, -1]

    model, x = Recurrent().eval(), torch.randn(2, 5, 3)
    state = torch.get_rng_state()
    mc = mp.monte_carlo(model, x, n_samples=600, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert mc.std.min() > 0
    again = mp.monte_carlo(model, x, n_samples=600, seed=1)
    assert torch.equal(mc.mean, again.mean)
    assert_agree(mc, loop(model, x, 600))


def test_what_cannot_be_vectorized_runs_one_by_one() -> None:
    """With the same noise."""
    model, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)), torch.rand(4, 3)
    bnn = mp.convert(model, x)
    expected = mp.monte_carlo(bnn, x, n_samples=30, samples_at_once=7)
    sampler = next(iter(_SAMPLERS[bnn._trace].values()))
    calls = []

    def many(*args: Tensor) -> None:
        calls.append(args)
        raise RuntimeError("no batching rule")

    sampler.many = many
    found = mp.monte_carlo(bnn, x, n_samples=30, samples_at_once=7)
    assert len(calls) == 1
    torch.testing.assert_close(found.samples, expected.samples)


def test_uncertain_inputs_are_sampled() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.2)).eval()
    x = mp.Moments(torch.randn(3, 4), torch.rand(3, 4))
    mc = mp.monte_carlo(model, x, n_samples=4000)
    exact = mp.convert(model, x)(x)
    assert ((mc.mean - exact.mean).abs() <= 5 * mc.mean_error).all()
    assert ((mc.variance - exact.variance).abs() <= 5 * mc.variance_error).all()


def test_empty_batch_and_bad_arguments() -> None:
    mc = mp.monte_carlo(network(), torch.zeros(0, 2, 6, 6), n_samples=3)
    assert mc.mean.shape == (0, 3)
    with pytest.raises(ValueError, match="n_samples"):
        mp.monte_carlo(network(), torch.zeros(2, 2, 6, 6), n_samples=1)


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    mp.monte_carlo(network(), torch.zeros(2, 2, 6, 6), n_samples=4, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "sampling" in captured.err


def test_drop_probability_is_exact() -> None:
    """Masks come from 32-bit integers: p = 0.005 must not be rounded to a coarse grid."""
    model = nn.Dropout(0.005)
    mc = mp.monte_carlo(model, torch.ones(1, 2_000_000), n_samples=2, keep_samples=True)
    dropped = (mc.samples == 0).double().mean().item()
    assert abs(dropped - 0.005) < 5 * (0.005 / 4_000_000) ** 0.5
    torch.testing.assert_close(mc.samples.max(), torch.tensor(1 / 0.995))


BATCH_USERS = {
    "rows picked by number": lambda x: F.dropout(x, 0.5, True)[torch.arange(x.shape[0]), [0] * 4],
    "rows reversed": lambda x: F.dropout(x, 0.5, True)[torch.arange(x.shape[0] - 1, -1, -1)],
    "divided by the batch size": lambda x: F.dropout(x, 0.5, True) / x.shape[0],
    "softmax over the batch": lambda x: F.dropout(x, 0.5, True).softmax(0),
    "sums along the batch": lambda x: F.dropout(x, 0.5, True).cumsum(0),
    "all pairs": lambda x: (F.dropout(x, 0.5, True) @ x.T).sum(1),
}


@pytest.mark.parametrize("function", BATCH_USERS.values(), ids=BATCH_USERS)
def test_models_that_use_the_batch_dimension(function) -> None:
    """Samples run at once are still one pass each: whatever a pass does with its batch stays inside it."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    x = torch.rand(4, 3)
    together = mp.monte_carlo(Model(), x, n_samples=500, samples_at_once=100)
    alone = mp.monte_carlo(Model(), x, n_samples=500, samples_at_once=1)
    torch.testing.assert_close(together.samples, alone.samples)
    assert_agree(together, loop(Model(), x, 2000))


def test_masks_do_not_depend_on_how_samples_are_batched() -> None:
    model, x = network(), torch.randn(3, 2, 6, 6)
    alone = mp.monte_carlo(model, x, n_samples=20, samples_at_once=1)
    together = mp.monte_carlo(model, x, n_samples=20, samples_at_once=7)
    torch.testing.assert_close(alone.samples, together.samples)


@pytest.mark.parametrize("noise", ["dropout", "input"])
def test_memory_stays_bounded(noise: str) -> None:
    """The largest activation counts, wherever it is: 10,000 samples of a wide output are streamed."""
    largest = 0

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, Tensor) else 0)
            return out

    if noise == "dropout":
        model: nn.Module = nn.Sequential(nn.Dropout(0.3), nn.Linear(10, 50_000))
        x: Tensor | mp.Moments = torch.randn(1, 10)
    else:
        model, x = nn.Linear(20_000, 4), mp.Moments(torch.randn(8, 20_000), 0.1)
    bnn = mp.convert(model, x, fidelity="fast")
    with Watching():
        mp.monte_carlo(bnn, x, n_samples=100, keep_samples=False)
    assert largest <= 2**21


def test_sampled_moments_are_a_node_of_trees() -> None:
    mean = torch.randn(3, 2, requires_grad=True)
    kept = torch.randn(5, 3, 2, requires_grad=True)
    options = {"n_samples": 5, "mean_error": mean * 2, "variance_error": mean**2, "kept": kept}
    moments = mp.SampledMoments(mean, mean**2, **options, head=("softmax", 1))
    apart = moments.detach()
    assert type(apart) is mp.SampledMoments
    fields = (apart.mean, apart.variance, apart.mean_error, apart.variance_error, apart.kept)
    assert not any(tensor.requires_grad for tensor in fields)
    assert (apart.n_samples, apart.head) == (5, ("softmax", 1))
    assert torch.equal(apart.samples, kept)
    assert mean.requires_grad
    leaves, spec = pytree.tree_flatten(moments)
    assert all(isinstance(leaf, Tensor) for leaf in leaves if leaf is not None)
    again = pytree.tree_unflatten(leaves, spec)
    assert torch.equal(again.mean_error, moments.mean_error)
    assert again.head == moments.head
    assert moments.to(torch.float64).kept.dtype == torch.float64
