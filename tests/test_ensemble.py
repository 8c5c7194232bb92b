"""Ensembles: mixtures, and members stacked into one graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp


def network(seed: int, width: int = 16, head: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
        nn.Flatten(),
    ]
    model = nn.Sequential(*layers, nn.Linear(36, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 3))
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    return (nn.Sequential(model, head) if head else model).eval()


X = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
def test_stacked_members_give_what_each_gives_alone(fidelity: str) -> None:
    members = [mp.convert(network(i), X, fidelity) for i in range(3)]
    ensemble = mp.Ensemble(members)
    assert ensemble.is_stacked
    for out, member in zip(ensemble(X), members, strict=True):
        alone = member(X)
        torch.testing.assert_close(out.mean, alone.mean)
        torch.testing.assert_close(out.variance, alone.variance)
        if fidelity == "accurate":
            torch.testing.assert_close(out.covariance, alone.covariance)
        else:
            assert out.covariance is None


def test_softmax_at_the_end_keeps_its_logits() -> None:
    members = [mp.convert(network(i, head=nn.Softmax(-1)), X) for i in range(2)]
    alone = mp.classify([m(X) for m in members])
    torch.testing.assert_close(mp.classify(mp.Ensemble(members)(X)).probs, alone.probs)


def test_classification_averages_probabilities() -> None:
    models = [network(i) for i in range(3)]
    for members in (models, [mp.convert(m, X) for m in models]):
        ensemble = mp.Ensemble(members)
        found = mp.classify(ensemble(X))
        each = torch.stack([mp.classify(m(X)).probs for m in members])
        torch.testing.assert_close(found.probs, each.mean(0))
        assert (found.epistemic > 0).all()
    samples = mp.Ensemble(models).monte_carlo(X, 100, seed=1)
    assert [s.n_samples for s in samples] == [100] * 3
    assert not torch.equal(samples[0].samples[:50], samples[1].samples[:50])
    each = torch.stack([mp.classify(s).probs for s in samples])
    torch.testing.assert_close(mp.classify(samples).probs, each.mean(0))


def test_regression_mixes_moments() -> None:
    members = [mp.convert(network(i), X) for i in range(3)]
    found = mp.regress(mp.Ensemble(members)(X), noise=0)
    outputs = [m(X) for m in members]
    means = torch.stack([o.mean for o in outputs])
    torch.testing.assert_close(found.mean, means.mean(0))
    between = means.var(0, correction=0)
    torch.testing.assert_close(found.epistemic, torch.stack([o.variance for o in outputs]).mean(0) + between)


def test_several_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.layer(nn.functional.dropout(x, 0.2, self.training))
            return {"values": h, "sizes": x.abs()}

    x = torch.randn(2, 4)
    members = [mp.convert(Two().eval(), x) for _ in range(2)]
    first, _ = mp.Ensemble(members, stack=True)(x)
    torch.testing.assert_close(first["values"].covariance, members[0](x)["values"].covariance)
    torch.testing.assert_close(first["sizes"].mean, x.abs())


def test_any_batch_size_and_refresh() -> None:
    models = [network(i) for i in range(2)]
    members = [mp.convert(m, X) for m in models]
    ensemble = mp.Ensemble(members)
    assert ensemble(X[:1])[0].mean.shape == (1, 3)
    with torch.no_grad():
        models[0][-1].bias.add_(1)  # a step of training is seen
        torch.testing.assert_close(ensemble(X)[0].mean, members[0](X).mean)


def test_weights_loaded_and_gradients() -> None:
    ensemble, other = (mp.Ensemble([mp.convert(network(i), X) for i in seeds]) for seeds in ((0, 1), (7, 8)))
    other.load_state_dict(ensemble.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(other(X)[1].mean, ensemble(X)[1].mean)
    mp.classify(ensemble(X)).nll(torch.zeros(5, dtype=torch.long)).mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ensemble.members.parameters())


def test_outputs_are_plain_moments() -> None:
    """Nothing of the rules is left: no facts, no closures, no tensors of vmap."""
    layers = [nn.Conv2d(1, 4, 3), nn.Dropout(0.3), nn.Conv2d(4, 4, 3), nn.MaxPool2d(2)]
    members = [mp.convert(nn.Sequential(*layers).eval(), X, "fast") for _ in range(2)]
    out = mp.Ensemble(members)(X)[1]
    assert type(out) is mp.Moments
    torch.testing.assert_close(out.mean, members[1](X).mean)
    assert not members[0](X).detach().mean.requires_grad
    assert members[0](X).facts == out.facts == ()


def test_uncertain_inputs() -> None:
    members = [mp.convert(network(i), X) for i in range(2)]
    noisy = mp.Moments(X, 0.1)
    out = mp.Ensemble(members)(noisy)[1]
    torch.testing.assert_close(out.covariance, members[1](noisy).covariance)


class Reader(nn.Module):
    """Its first recurrent layer comes before all noise; the last may come behind it."""

    def __init__(self, seed: int, kind: type[nn.RNNBase], dropped_between: float) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.rnn = kind(4, 5, num_layers=2, dropout=dropped_between, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.rnn(x)[0][:, -1])
        return y


@pytest.mark.parametrize("fidelity", ["fast", "accurate"])
@pytest.mark.parametrize("dropped_between", [0.0, 0.2])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_before_all_noise_run_one_by_one(
    kind: type[nn.RNNBase], dropped_between: float, fidelity: str
) -> None:
    x = torch.randn(2, 6, 4)
    members = [mp.convert(Reader(i, kind, dropped_between).eval(), x, fidelity) for i in range(2)]
    ensemble = mp.Ensemble(members)
    assert not ensemble.is_stacked
    for out, member in zip(ensemble(x), members, strict=True):
        torch.testing.assert_close(out.variance, member(x).variance)
    with pytest.raises(ValueError, match=r"vmap(.|\n)*rnn"):
        mp.Ensemble(members, stack=True)


def test_recurrent_layers_behind_noise_are_stacked() -> None:
    """Unless a call with certain inputs has no noise in front of them."""
    x, noise = torch.randn(2, 6, 4), nn.Dropout(0.2)
    members = [mp.convert(nn.Sequential(noise, Reader(i, nn.LSTM, 0.1)).eval(), x) for i in range(2)]
    ensemble = mp.Ensemble(members, stack=True)
    torch.testing.assert_close(ensemble(x)[1].covariance, members[1](x).covariance)
    members = [mp.convert(Reader(i, nn.LSTM, 0.1).eval(), mp.Moments(x, 0.1)) for i in range(2)]
    torch.testing.assert_close(mp.Ensemble(members)(x)[1].covariance, members[1](x).covariance)


def test_members_that_differ_run_one_by_one() -> None:
    different = [mp.convert(network(0), X), mp.convert(network(1, width=8), X)]
    tiers = [mp.convert(network(0), X, "fast"), mp.convert(network(1), X)]
    mixed = [mp.convert(network(0), X), network(1)]
    for members, reason in ((different, "shape"), (tiers, "settings|graphs"), (mixed, "not all of them")):
        ensemble = mp.Ensemble(members)
        assert not ensemble.is_stacked
        assert len(ensemble(X)) == 2
        assert mp.classify(ensemble(X)).probs.shape == (5, 3)
        with pytest.raises(ValueError, match=reason):
            mp.Ensemble(members, stack=True)
    with pytest.raises(ValueError, match="at least one member"):
        mp.Ensemble([])
    bare = [mp.convert(nn.Sequential(nn.Dropout(0.1), nn.Flatten()).eval(), X) for _ in range(2)]
    assert not mp.Ensemble(bare).is_stacked
