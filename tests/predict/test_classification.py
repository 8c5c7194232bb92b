"""Class probabilities from moments, samples, plain outputs and ensembles."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.rules.linearization import Propagated
from momentprop.rules.registry import RULES
from momentprop.sample import SampledMoments


def network(*head: nn.Module, n_outputs: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    body = [nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, n_outputs)]
    model = nn.Sequential(*body, *head).eval()
    with torch.no_grad():
        model[3].weight.mul_(5)
    return model


X = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))


def sampled(samples: Tensor) -> SampledMoments:
    return SampledMoments(samples.mean(0), samples.var(0), n_samples=len(samples), kept=samples)


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
@pytest.mark.parametrize("method", ["integrate", "paper"])
def test_softmax_at_the_end_of_the_network_changes_nothing(fidelity: str, method: str) -> None:
    expected = mp.classify(mp.convert(network(), X, fidelity)(X), method)
    for head in (nn.Softmax(-1), nn.Softmax(1), nn.LogSoftmax(1)):
        out = mp.convert(network(head), X, fidelity)(X)
        found = mp.classify(out, method)
        torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-4, atol=1e-5)
        if expected.aleatoric is not None:
            torch.testing.assert_close(found.epistemic, expected.epistemic, rtol=1e-3, atol=1e-5)


def test_probabilities_keep_a_covariance_of_their_own() -> None:
    """It is made from that of the logits."""
    out = mp.convert(network(nn.Softmax(-1)), X, "accurate")(X)
    assert out.logits is not None
    logits = mp.convert(network(), X, "accurate")(X)
    torch.testing.assert_close(out.logits.moments.covariance, logits.covariance, rtol=1e-4, atol=1e-5)

    assert out.covariance is not None
    mc = mp.monte_carlo(network(nn.Softmax(-1)), X, 4000, seed=0, keep_samples=True).samples
    expected = torch.stack([samples.T.cov() for samples in mc.unbind(1)])
    assert (out.covariance - expected).norm() < 0.1 * expected.norm()
    assert out.to(torch.float64).logits.moments.covariance.dtype == torch.float64


def test_chosen_outputs_of_a_network_with_softmax() -> None:
    expected = mp.classify(mp.convert(network(), X, outputs=2)(X))
    found = mp.classify(mp.convert(network(nn.Softmax(-1)), X, outputs=2)(X))
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "head", [[], [nn.Softmax(-1)], [nn.LogSoftmax(-1)]], ids=["logits", "softmax", "log"]
)
def test_samples_are_a_mixture(head: list[nn.Module]) -> None:
    mc = mp.monte_carlo(network(*head), X, 200, seed=3)
    p = mp.monte_carlo(network(), X, 200, seed=3).samples.softmax(-1)
    found = mp.classify(mc)
    torch.testing.assert_close(found.probs, p.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.probs_variance, p.var(0, correction=0), rtol=1e-3, atol=1e-6)
    entropy = torch.special.entr(p).sum(-1).mean(0)
    torch.testing.assert_close(found.aleatoric, entropy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        found.epistemic, torch.special.entr(p.mean(0)).sum(-1) - entropy, rtol=1e-2, atol=1e-5
    )


def test_one_pass_is_close_to_sampling() -> None:
    model = network()
    mc = mp.classify(mp.monte_carlo(model, X, 20_000, seed=0))
    ours = mp.classify(mp.convert(model, X)(X))
    assert (ours.probs - mc.probs).abs().max() < 0.03
    ratio = ours.epistemic / mc.epistemic
    assert 0.9 < ratio.median() < 1.1
    by_paper = mp.classify(mp.convert(model, X, "paper")(X), "paper")
    assert (by_paper.probs - mc.probs).abs().mean() > 3 * (ours.probs - mc.probs).abs().mean()


def test_plain_network_has_no_epistemic_part() -> None:
    logits = torch.randn(7, 5)
    found = mp.classify(logits)
    torch.testing.assert_close(found.probs, logits.softmax(-1))
    assert (found.epistemic < 1e-6).all()
    assert (found.probs_variance < 1e-6).all()


def test_measures() -> None:
    p = mp.classify(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]).log())
    assert p.label.tolist() == [0, 2]
    torch.testing.assert_close(p.confidence, torch.tensor([0.7, 0.8]))
    torch.testing.assert_close(p.nll(torch.tensor([1, 2])), -torch.tensor([0.2, 0.8]).log())
    expected = torch.distributions.Categorical(probs=p.probs).entropy()
    torch.testing.assert_close(p.entropy, expected)
    torch.testing.assert_close(p.total, expected)
    torch.testing.assert_close(p.distribution().entropy(), expected)
    draws = p.sample((20_000,), torch.Generator().manual_seed(0))
    assert draws.shape == (20_000, 2)
    assert abs((draws[:, 0] == 0).float().mean() - 0.7) < 0.02
    assert p.sample().shape == (2,)
    served = json.loads(json.dumps(p.to_dict()))
    assert served["label"] == [0, 2]
    assert set(served) == {"probs", "label", "confidence", "total", "aleatoric", "epistemic", "abstain"}


def test_tiny_probabilities_keep_their_logarithm() -> None:
    p = mp.classify(mp.Moments(torch.tensor([[500.0, 0.0, -500.0]]), 1.0))
    assert p.probs[0, 2] == 0
    assert 900 < p.nll(torch.tensor([2])).item() < 1010


def test_segmentation_and_tagging() -> None:
    """Classes in dimension 1 of an image, or in the last dimension of a sequence."""
    mean, variance = torch.randn(2, 3, 4, 5), torch.rand(2, 3, 4, 5)
    found = mp.classify(mp.Moments(mean, variance))
    assert found.probs.shape == (2, 3, 4, 5)
    assert found.entropy.shape == (2, 4, 5)
    one = mp.classify(mp.Moments(mean[:, :, 1, 2], variance[:, :, 1, 2]))
    torch.testing.assert_close(found.probs[:, :, 1, 2], one.probs)
    torch.testing.assert_close(found.epistemic[:, 1, 2], one.epistemic)
    assert found.nll(torch.randint(3, (2, 4, 5))).shape == (2, 4, 5)
    last = mp.classify(mp.Moments(mean.movedim(1, -1), variance.movedim(1, -1)), dim=-1)
    torch.testing.assert_close(last.probs, found.probs)
    of_samples = mp.classify(sampled(mean.movedim(1, -1)[None].repeat(3, 1, 1, 1, 1)), dim=-1)
    torch.testing.assert_close(of_samples.probs, mean.softmax(1))


def test_covariance_of_positions() -> None:
    """An image of few pixels in the accurate tier: each pixel has the covariance of its own classes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.3), nn.Conv2d(2, 3, 3, padding=1)).eval()
    x = torch.randn(4, 2, 2, 3) * 3
    out = mp.convert(model, x, "accurate")(x)
    found = mp.classify(out)
    mc = mp.classify(mp.monte_carlo(model, x, 20_000))
    assert found.probs.shape == (4, 3, 2, 3)
    # the remaining difference is the logits' shape: few masks, not Gaussian
    assert (found.probs - mc.probs).abs().mean() < 0.02
    forgotten = mp.classify(mp.Moments(out.mean, out.variance))
    assert (forgotten.probs - mc.probs).abs().mean() > (found.probs - mc.probs).abs().mean()
    pixel = out.covariance.reshape(4, 3, 6, 3, 6)[:, :, 4, :, 4]
    alone = mp.classify(mp.Moments(out.mean[:, :, 1, 1], out.variance[:, :, 1, 1], pixel))
    torch.testing.assert_close(found.probs[:, :, 1, 1], alone.probs)


class Epochs(nn.Module):
    """Classes for every step of a recurrent layer: of [time, batch, 4], or of rows [batch * 3, 4]."""

    def __init__(self, folded: bool, time_first: bool, head: nn.Module) -> None:
        super().__init__()
        self.folded, self.swapped = folded, folded and time_first
        self.drop, self.rnn = nn.Dropout(0.3), nn.GRU(4, 5, batch_first=folded)
        self.head = nn.Sequential(nn.Linear(5, 3), head)

    def forward(self, x: Tensor) -> Tensor:
        h = self.rnn(self.drop(x).view(-1, 3, 4) if self.folded else self.drop(x))[0]
        h = h.transpose(0, 1) if self.swapped else h
        y: Tensor = self.head(h.flatten(0, 1) if self.folded else h)
        return y


@pytest.mark.parametrize("head", [nn.Identity(), nn.Softmax(-1)], ids=["logits", "softmax"])
@pytest.mark.parametrize("layout", ["batch * time", "time * batch", "time, batch"])
def test_covariance_where_the_batch_is_not_the_first_dimension(layout: str, head: nn.Module) -> None:
    """Each step has the block of its own classes, out of the covariance of its sample."""
    torch.manual_seed(0)
    folded = "*" in layout
    model, x = Epochs(folded, layout.startswith("time"), head).eval(), torch.randn(4, 3, 4)
    x = x.flatten(0, 1) if folded else x.transpose(0, 1)
    out = mp.convert(model, x, "accurate", batch_dim=0 if folded else 1)(x)
    found = mp.classify(out, dim=-1)
    logits = out if out.logits is None else out.logits.moments
    blocks = logits.covariance.reshape(4, 3, 3, 3, 3).diagonal(dim1=1, dim2=3).movedim(-1, 1)
    mean = logits.mean.reshape((4, 3, 3) if layout.startswith("batch") else (3, 4, 3))
    variance = logits.variance.reshape(mean.shape)
    if layout.startswith("time"):
        mean, variance = mean.transpose(0, 1), variance.transpose(0, 1)
    alone = mp.classify(mp.Moments(mean.flatten(0, 1), variance.flatten(0, 1), blocks.flatten(0, 1)))
    rows = found.epistemic.T if layout == "time, batch" else found.epistemic
    rows = rows.reshape(3, 4).T if layout == "time * batch" else rows
    torch.testing.assert_close(rows.flatten(), alone.epistemic)
    assert mp.regress(out, noise=0).std.shape == out.shape


def test_classes_of_nodes_of_a_graph() -> None:
    """All inputs together are one sample, whose covariance is that of all nodes."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 3)).eval(), torch.randn(5, 4)
    expected = mp.classify(mp.convert(model, x)(x))
    found = mp.classify(mp.convert(model, x, batch_dim=None)(x))
    torch.testing.assert_close(found.epistemic, expected.epistemic)
    some = mp.convert(model, x, batch_dim=None, outputs=[0, 3])(x)  # no covariance of a node's classes
    torch.testing.assert_close(
        mp.classify(some).epistemic, mp.classify(mp.Moments(some.mean, some.variance)).epistemic
    )


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_one_logit_is_binary(shape: tuple[int, ...]) -> None:
    mean, variance = torch.randn(shape), torch.rand(shape) * 4
    found = mp.classify(mp.Moments(mean, variance))
    assert found.probs.shape == (6, 2)
    z = mean.flatten() + variance.flatten().sqrt() * torch.randn(200_000, 6)
    torch.testing.assert_close(found.probs[:, 1], z.sigmoid().mean(0), rtol=0, atol=5e-3)
    assert found.label.tolist() == (mean.flatten() > 0).int().tolist()
    plain = mp.classify(mean)
    torch.testing.assert_close(plain.probs[:, 1], mean.flatten().sigmoid())
    assert mp.classify(sampled(torch.randn(9, *shape))).probs.shape == (6, 2)


def test_many_labels() -> None:
    mean, variance = torch.randn(6, 3), torch.rand(6, 3) * 4
    found = mp.classify(mp.Moments(mean, variance), kind="multilabel")
    assert found.probs.shape == (6, 2, 3)
    assert found.nll(torch.randint(2, (6, 3))).shape == (6, 3)
    one = mp.classify(mp.Moments(mean[:, 1], variance[:, 1]))
    torch.testing.assert_close(found.probs[:, :, 1], one.probs)
    samples = torch.randn(50, 6, 3)
    of_samples = mp.classify(sampled(samples), kind="multilabel")
    torch.testing.assert_close(of_samples.probs[:, 1], samples.sigmoid().mean(0))


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
@pytest.mark.parametrize("n_outputs", [1, 3])
def test_sigmoid_at_the_end_of_the_network_changes_nothing(fidelity: str, n_outputs: int) -> None:
    kind = "binary" if n_outputs == 1 else "multilabel"
    plain, ending = network(n_outputs=n_outputs), network(nn.Sigmoid(), n_outputs=n_outputs)
    out = mp.convert(ending, X, fidelity)(X)
    expected = mp.classify(mp.convert(plain, X, fidelity)(X), kind=kind)
    torch.testing.assert_close(mp.classify(out).probs, expected.probs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        out.mean.squeeze(1), expected.probs[:, 1], rtol=0, atol=5e-4
    )  # 512 points and the rule's sum
    sampled = mp.classify(mp.monte_carlo(ending, X, 100, seed=5))
    same = mp.classify(mp.monte_carlo(plain, X, 100, seed=5), kind=kind)
    torch.testing.assert_close(sampled.probs, same.probs, rtol=1e-4, atol=1e-6)
    if fidelity == "accurate":
        assert out.covariance is not None
        assert out.covariance.shape == (len(X), n_outputs, n_outputs)


def test_sigmoid_behind_a_jump_keeps_its_logits() -> None:
    """Few inputs dropped at a time: dropout, layer and activation would become one operator."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1), nn.Sigmoid()]
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        model[3].bias.fill_(-4.0)
    x = torch.randn(5, 4)
    found = mp.classify(mp.convert(model, x)(x))
    expected = mp.classify(mp.convert(model[:4], x)(x))
    torch.testing.assert_close(found.probs, expected.probs)
    assert (found.probs[:, 1] < 0.1).all()


@pytest.mark.parametrize("shape", [(2, 1, 3, 3), (2, 1, 4)])
def test_one_logit_per_position_is_binary(shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape)
    for output in (logits, mp.Moments(logits, 0.0), sampled(logits[None].repeat(3, *[1] * len(shape)))):
        found = mp.classify(output)
        assert found.probs.shape == (2, 2, *shape[2:])
        torch.testing.assert_close(found.probs[:, 1], logits[:, 0].sigmoid(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    logits = mp.Moments(torch.tensor([[1.0, 0.0, -1.0]]), 1.0)
    torch.testing.assert_close(mp.classify(logits.to(dtype)).probs, mp.classify(logits).probs)
    plain = mp.classify(logits.mean.to(dtype)).probs
    torch.testing.assert_close(plain, logits.mean.softmax(1), rtol=1e-2, atol=1e-2)


def test_gradients_where_there_is_no_variance() -> None:
    """All units off in the second sample."""
    for fidelity in ("fast", "accurate"):
        model = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Dropout(0.3), nn.Linear(4, 3)).eval()
        with torch.no_grad():
            model[0].bias.fill_(-3.0)
            model[0].weight.fill_(1.0)
        x = torch.tensor([[5.0], [0.0]])
        mp.classify(mp.convert(model, x, fidelity)(x)).nll(torch.tensor([0, 0])).mean().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_masked_classes() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    for output in (logits, mp.Moments(logits, torch.tensor([[1.0, 1.0, 0.0]]))):
        found = mp.classify(output)
        assert found.probs[0, 2] == 0
        assert 0 < found.entropy < 0.7
        assert found.epistemic.isfinite().all()


def test_samples_stay_samples() -> None:
    mc = mp.monte_carlo(network(nn.Softmax(-1)), X, 50)
    torch.testing.assert_close(mp.classify(mc.to(torch.float64)).probs.float(), mp.classify(mc).probs)


def test_common_variance_does_not_make_variances_negative() -> None:
    torch.manual_seed(0)
    model = network(nn.Softmax(-1))
    with torch.no_grad():
        model[3].weight.copy_(torch.randn(1, 32).expand(4, 32) * 5 + 1e-3 * torch.randn(4, 32))
    out = mp.convert(model, X, "accurate")(X * 3)
    assert (out.variance >= 0).all()
    assert out.std.isfinite().all()


def test_images_run_in_strips() -> None:
    mean, variance = torch.randn(1, 21, 20, 30), torch.rand(1, 21, 20, 30)
    found = mp.classify(mp.Moments(mean, variance))
    part = mp.classify(mp.Moments(mean[..., :3, :], variance[..., :3, :]))
    torch.testing.assert_close(found.log_probs[..., :3, :], part.log_probs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.entropy[..., :3, :], part.entropy, rtol=1e-4, atol=1e-4)


def test_exports_with_the_points_not_made_yet() -> None:
    from momentprop.gaussian import logits

    class Predict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bnn = mp.convert(network(), X, "accurate")

        def forward(self, x: Tensor) -> Tensor:
            return mp.classify(self.bnn(x)).probs

    model = Predict()
    expected = model(X)
    logits._sobol.cache_clear()
    torch.testing.assert_close(torch.export.export(model, (X,)).module()(X), expected, rtol=1e-4, atol=1e-5)


def test_points_first_made_in_inference_mode() -> None:
    from momentprop.gaussian import logits

    logits._sobol.cache_clear()
    with torch.inference_mode():
        mp.classify(mp.Moments(torch.randn(2, 3).double(), 1.0))
    mean = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    mp.classify(mp.Moments(mean, 1.0)).entropy.sum().backward()


def test_ensemble_is_a_mixture() -> None:
    members = [mp.Moments(torch.randn(5, 3), torch.rand(5, 3)) for _ in range(3)]
    each = [mp.classify(m) for m in members]
    found = mp.classify(members)
    torch.testing.assert_close(found.probs, torch.stack([e.probs for e in each]).mean(0))
    torch.testing.assert_close(found.aleatoric, torch.stack([e.aleatoric for e in each]).mean(0))
    spread = torch.stack([e.probs_variance + e.probs**2 for e in each]).mean(0) - found.probs**2
    torch.testing.assert_close(found.probs_variance, spread, rtol=1e-4, atol=1e-6)
    assert (found.epistemic > 0).all()
    mixed = mp.classify([members[0], torch.randn(5, 3), sampled(torch.randn(9, 5, 3))])
    assert mixed.probs.shape == (5, 3)


def test_differentiable() -> None:
    mean = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    root = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)

    def nll(mean: Tensor, root: Tensor) -> Tensor:
        covariance = root @ root.mT
        moments = mp.Moments(mean, covariance.diagonal(dim1=1, dim2=2), covariance)
        return mp.classify(moments).nll(torch.tensor([0, 1, 3]))

    assert torch.autograd.gradcheck(nll, (mean, root), atol=1e-4)


def test_probabilities_are_not_taken_for_logits() -> None:
    """Where the softmax is not the last operator, it is not recognised."""
    p = torch.randn(20, 3).softmax(1)
    for output in (p, mp.Moments(p, 0.01), sampled(p.expand(4, 20, 3))):
        with pytest.raises(ValueError, match="look like probabilities"):
            mp.classify(output)
    torch.testing.assert_close(mp.classify(p.log()).probs, p)
    mp.classify(torch.tensor([[1.0, 0.0, 0.0]]))  # one row can be such logits
    torch.vmap(lambda z: mp.classify(z).probs)(torch.randn(2, 9, 3))


def test_softmax_with_a_rule_of_ones_own() -> None:
    """Its outputs have no logits; everything else works."""
    ours = RULES.find(torch.ops.aten.softmax.int)

    @mp.rule(torch.ops.aten.softmax.int, override=True)
    def softmax(x: mp.Moments, dim: int, dtype: torch.dtype | None = None) -> Propagated:
        found = ours.propagate(x, dim, dtype)
        return Propagated(mp.Moments(x.mean.softmax(dim), found.moments.variance), found.linearize)

    out = mp.convert(network(nn.Softmax(-1)), X, "accurate")(X)
    assert out.logits is None
    assert out.covariance.shape == (50, 4, 4)


def test_clear_errors() -> None:
    logits = mp.Moments(torch.randn(4, 3), 1.0)
    with pytest.raises(ValueError, match="method must be one of integrate, paper"):
        mp.classify(logits, "softmax")
    with pytest.raises(ValueError, match="kind must be one of"):
        mp.classify(logits, kind="ordinal")
    with pytest.raises(TypeError, match="must hold Moments"):
        mp.classify("logits")
    with pytest.raises(ValueError, match="at least one member"):
        mp.classify([])
    with pytest.raises(mp.InputError, match=r"several outputs \(0, 1\); say with select="):
        mp.classify((logits, logits))
    with pytest.raises(ValueError, match="floating-point"):
        mp.classify(torch.tensor([[1, 2, 3]]))
    with pytest.raises(ValueError, match="need a batch dimension"):
        mp.classify(torch.randn(3), kind="multiclass")
    with pytest.raises(ValueError, match="one logit is no choice"):
        mp.classify(torch.randn(4, 1), dim=1)
    with pytest.raises(ValueError, match="kind='multilabel'"):
        mp.classify(logits, kind="binary")
    with pytest.raises(ValueError, match="needs the batch there"):
        mp.classify(mp.Moments(torch.randn(4, 3), 1.0, torch.eye(3).expand(2, 3, 3)))
    with pytest.raises(mp.MomentpropError, match="method='integrate'"):
        _ = mp.classify(logits, "paper").epistemic
    found = mp.classify(logits)
    with pytest.raises(ValueError, match="class indices from 0 to 2"):
        found.nll(torch.tensor([0, 1, 2, 3]))
    with pytest.raises(ValueError, match="expected class indices"):
        found.nll(torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="class indices from 0 to 2"):
        found.nll(torch.zeros(4))
    streamed = SampledMoments(torch.zeros(2, 3), torch.ones(2, 3), n_samples=5)
    with pytest.raises(mp.MomentpropError, match="keep_samples"):
        mp.classify(streamed)
    assert math.isclose(found.probs.sum().item(), 4, rel_tol=1e-5)
