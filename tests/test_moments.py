"""Moments are values: they never change, and their standard deviation can be differentiated everywhere."""

import dataclasses
import io
import pickle

import pytest
import torch
from torch import nn

import momentprop as mp


@pytest.mark.parametrize("name", ["mean", "variance", "covariance", "facts", "of_my_own"])
def test_moments_are_immutable(name: str) -> None:
    x = mp.Moments(torch.zeros(2), 1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(x, name, torch.ones(2))
    assert not x.mean.any()


def test_std_is_zero_with_a_gradient_of_zero_where_the_variance_is() -> None:
    variance = torch.tensor([0.0, 0.25, 0.0], requires_grad=True)
    std = mp.Moments(torch.ones(3), variance).std
    assert std.tolist() == [0.0, 0.5, 0.0]
    (gradient,) = torch.autograd.grad(std.sum(), variance)
    assert gradient.tolist() == [0.0, 1.0, 0.0]


def test_std_of_a_variance_that_is_no_number_is_none() -> None:
    std = mp.Moments(torch.ones(2), torch.tensor([torch.nan, torch.inf])).std
    assert std[0].isnan()
    assert std[1].isinf()


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
def test_gradients_of_a_networks_std_are_finite_where_it_is_zero(fidelity: str) -> None:
    """The second sample is all zeros, so no dropout changes it."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 4, bias=False), nn.ReLU()).eval()
    x = torch.stack([torch.randn(3), torch.zeros(3)]).requires_grad_()
    std = mp.convert(model, x.detach(), fidelity)(x).std
    assert std[1].max() < 1e-12
    assert std[0].max() > 0
    gradients = torch.autograd.grad(std.sum(), [x, *model.parameters()], allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in gradients)


@pytest.fixture(scope="module")
def swept() -> mp.Moments:
    """Moments with everything that there is: logits, covariance and jumps."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3), nn.Softmax(-1)).eval()
    return mp.convert(model, torch.zeros(1, 4), "accurate", jumps=2)(torch.randn(5, 4)).detach()


def same(one: mp.Moments, other: mp.Moments) -> bool:
    first, second = (torch.utils._pytree.tree_flatten(m) for m in (one, other))
    return first[1] == second[1] and all(
        a is b or torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True)
    )


@pytest.mark.parametrize("index", [slice(1, 3), [0, 3], torch.tensor([True, False, True, False, False]), -1])
def test_an_index_chooses_inputs_of_the_batch(swept: mp.Moments, index) -> None:
    found = swept[index]
    assert torch.equal(found.mean, swept.mean[index])
    assert torch.equal(found.covariance, swept.covariance[index])
    logits = swept.logits.moments
    assert torch.equal(found.logits.moments.variance, logits.variance[index])
    assert torch.equal(found.logits.moments.jumps.effects, logits.jumps.effects[:, index])


def test_batches_are_taken_apart_and_put_together(swept: mp.Moments) -> None:
    assert len(swept) == 5
    assert same(mp.Moments.cat([swept[:2], swept[2:]]), swept)
    assert same(mp.Moments.stack(list(swept)), swept)


def test_an_index_into_elements_is_refused(swept: mp.Moments) -> None:
    with pytest.raises(TypeError, match=r"index \.mean, \.variance and \.covariance"):
        swept[:, 0]


def test_an_index_into_rows_that_are_no_inputs_is_refused() -> None:
    rows = mp.Moments(torch.zeros(6, 2), 1.0, torch.eye(4).expand(3, 4, 4))
    with pytest.raises(TypeError, match="the batch is not the first dimension"):
        rows[0]


def test_samples_are_indexed_along() -> None:
    mc = mp.monte_carlo(nn.Dropout(0.5), torch.ones(4, 3), n_samples=10)
    assert torch.equal(mc[1:3].samples, mc.samples[:, 1:3])
    assert isinstance(mc[0], mp.SampledMoments)
    assert repr(mc) == "SampledMoments(shape=(4, 3), dtype=torch.float32, device=cpu, n_samples=10)"


def test_an_empty_batch_is_something() -> None:
    assert mp.Moments(torch.zeros(0, 3), 1.0)


def test_correlation_is_that_of_numpy(swept: mp.Moments) -> None:
    d = swept.covariance[0].diagonal().sqrt()
    torch.testing.assert_close(swept.correlation[0], swept.covariance[0] / d[:, None] / d)
    certain = mp.Moments(
        torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    )
    assert torch.equal(certain.correlation, torch.eye(2)[None])


def test_distributions_have_the_moments(swept: mp.Moments) -> None:
    """The three probabilities sum to one, so their covariance is singular."""
    joint = swept.distribution()
    assert isinstance(joint, torch.distributions.MultivariateNormal)
    torch.testing.assert_close(joint.stddev, swept.stddev, rtol=1e-4, atol=0)
    torch.testing.assert_close(joint.covariance_matrix, swept.covariance, rtol=1e-3, atol=1e-6)
    alone = dataclasses.replace(swept, covariance=None).distribution()
    torch.testing.assert_close(alone.stddev, swept.std)
    assert alone.log_prob(swept.mean).shape == joint.log_prob(swept.mean).shape == (5,)
    assert mp.Moments(torch.zeros(2, 3), 0.0).distribution().sample().shape == (2, 3)


def test_numpy_has_what_is_known(swept: mp.Moments) -> None:
    found = swept.numpy()
    assert list(found) == ["mean", "std", "covariance"]
    assert (found["std"] == swept.std.numpy()).all()


def test_files_of_moments_are_read_without_unpickling_code(swept: mp.Moments) -> None:
    for moments in (swept, mp.monte_carlo(nn.Dropout(0.5), torch.ones(2, 3), n_samples=10)):
        file = io.BytesIO()
        torch.save(moments, file)
        file.seek(0)
        assert same(torch.load(file, weights_only=True), moments)
        assert same(pickle.loads(pickle.dumps(moments)), moments)


def test_data_loaders_collate_moments() -> None:
    data = [(mp.Moments(torch.full((3,), float(i)), 0.1), i) for i in range(4)]
    x, labels = next(iter(torch.utils.data.DataLoader(data, batch_size=4)))
    assert x.mean[:, 0].tolist() == labels.tolist() == [0, 1, 2, 3]


def test_notebooks_show_means_and_stds() -> None:
    shown = mp.Moments(torch.tensor([[1.0, 2.0]]), 0.25)._repr_html_()
    assert "<td>1 &plusmn; 0.5</td><td>2 &plusmn; 0.5</td>" in shown
