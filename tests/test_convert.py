"""The contract of `convert`: structures, batches, state, devices, compilation, errors."""

from __future__ import annotations

import copy
import dataclasses
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import momentprop as mp
from exact import Model
from small import assert_untouched, cnn, mlp, snapshot

Pair = namedtuple("Pair", ["first", "second"])


class TestBatches:
    @pytest.mark.parametrize("example_batch", [0, 1, 2, 7])
    def test_any_batch_size_runs_afterwards(self, example_batch: int) -> None:
        bnn = mp.convert(cnn().eval(), torch.zeros(example_batch, 3, 8, 8))
        for batch in (0, 1, 2, 5):
            out = bnn(torch.randn(batch, 3, 8, 8))
            assert out.mean.shape == out.variance.shape == (batch, 5)
            assert (out.variance >= 0).all()

    def test_samples_do_not_influence_each_other(self) -> None:
        bnn = mp.convert(cnn().eval(), torch.zeros(2, 3, 8, 8))
        x = torch.randn(6, 3, 8, 8)
        whole = bnn(x)
        for i in range(6):
            torch.testing.assert_close(bnn(x[i : i + 1]).mean, whole.mean[i : i + 1])
            torch.testing.assert_close(bnn(x[i : i + 1]).variance, whole.variance[i : i + 1])

    def test_a_fixed_batch_size_in_the_model_is_reported(self) -> None:
        class Fixed(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return F.dropout(x, 0.5, self.training).view(4, 6)

        bnn = mp.convert(Fixed(), torch.zeros(4, 2, 3), fidelity="fast")
        assert bnn(torch.zeros(4, 2, 3)).shape == (4, 6)
        with pytest.raises(mp.InputError, match=r"must have shape \[4, 2, 3\], not \[5, 2, 3\]"):
            bnn(torch.zeros(5, 2, 3))


class TestStructures:
    def test_kwargs_tuples_dicts_and_constants(self) -> None:
        class Many(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.dropout, self.linear = nn.Dropout(0.2), nn.Linear(4, 2)

            def forward(self, x, pair, *, scale, flag=True):
                hidden = self.linear(self.dropout(x + pair[0]))
                return {"out": (hidden * scale, pair[1]), "none": None, "named": Pair(hidden, 3)}

        x, a, b, s = torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 1)
        model = Many().eval()
        bnn = mp.convert(model, ((x, (a, b)), {"scale": s, "flag": True}))
        out = bnn(x, (a, b), scale=s, flag=True)
        plain = model(x, (a, b), scale=s)
        torch.testing.assert_close(out["out"][0].mean, plain["out"][0])
        assert isinstance(out["out"][1], mp.Moments)  # no dropout reaches it
        assert torch.equal(out["out"][1].mean, b)
        assert not out["out"][1].variance.any()
        assert out["none"] is None
        assert isinstance(out["named"], Pair)
        assert out["named"].second == 3
        torch.testing.assert_close(bnn(x=x, pair=(a, b), flag=True, scale=s)["out"][0].mean, plain["out"][0])
        with pytest.raises(mp.InputError, match="was True when traced"):
            bnn(x, (a, b), scale=s, flag=False)
        with pytest.raises(mp.InputError, match="keywords"):
            bnn(x, (a, b), scale=s)

    def test_dataclass_outputs(self) -> None:
        @dataclasses.dataclass
        class Output:
            logits: torch.Tensor
            extra: dict
            text: str = "a"

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = mlp()

            def forward(self, x):
                return Output(self.net(x), {"hidden": x})

        model = Model().eval()
        out = mp.convert(model, torch.zeros(2, 4))(torch.ones(3, 4))
        assert type(out) is Output
        assert out.text == "a"
        assert out.logits.shape == (3, 3)
        assert isinstance(out.extra["hidden"], mp.Moments)
        mc = mp.monte_carlo(model, torch.ones(3, 4), n_samples=10)
        assert type(mc) is Output
        assert mc.extra["hidden"].variance.sum() == 0

    def test_several_inputs_one_uncertain(self) -> None:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.dropout = nn.Dropout(0.5)

            def forward(self, x, y):
                return self.dropout(x) - 2 * y

        x, y = torch.randn(3, 4), torch.randn(3, 4)
        bnn = mp.convert(Two(), (x, y))
        plain = bnn(x, y)
        noisy = bnn(x, mp.Moments(y, 0.25))
        torch.testing.assert_close(plain.variance, x**2)
        torch.testing.assert_close(noisy.variance, x**2 + 4 * 0.25)

    def test_an_uncertain_input_may_need_decompositions_before_the_first_dropout(self) -> None:
        class Early(nn.Module):
            def forward(self, x):
                return F.dropout(torch.hstack([x, -x]), 0.5, self.training)

        x = torch.randn(3, 4)
        bnn = mp.convert(Early(), x)
        assert bnn(x).shape == (3, 8)
        expected = torch.hstack([x, -x]) ** 2 + 2 * 0.5  # V + p/(1-p) (E^2 + V)
        torch.testing.assert_close(bnn(mp.Moments(x, 0.5)).variance, expected)

    def test_shared_modules_and_branches(self) -> None:
        class Shared(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.1)

            def forward(self, x):
                a = self.dropout(torch.relu(self.linear(x)))
                return torch.cat([self.linear(a), x], dim=1) + 1

        bnn = mp.convert(Shared(), torch.zeros(2, 4))
        out = bnn(torch.randn(5, 4))
        assert out.shape == (5, 8)
        assert not out.variance[:, 4:].any()
        assert out.variance[:, :4].any()

    def test_integer_inputs(self) -> None:
        model = nn.Sequential(nn.Embedding(10, 4), nn.Dropout(0.5), nn.Linear(4, 2))
        tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
        bnn = mp.convert(model, tokens)
        assert bnn(tokens).shape == (2, 3, 2)
        with pytest.raises(mp.InputError, match=r"must be torch\.int64"):
            bnn(tokens.float())


class TestUntouched:
    def test_by_conversion_and_calls(self) -> None:
        model = cnn().train()
        model[4].eval()
        model.register_forward_hook(lambda *_: None)
        x = torch.randn(3, 3, 8, 8)
        before = snapshot(model)
        bnn = mp.convert(model, x)
        bnn(x)
        mp.monte_carlo(model, x, n_samples=5)
        bnn.double()(x.double())
        bnn.train()
        assert_untouched(model, before)

    def test_by_failed_conversion(self) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bn, self.net = nn.BatchNorm1d(4), mlp()

            def forward(self, x):
                x = self.net(self.bn(x))
                return x if x.sum() > 0 else -x

        model, x = Odd().train(), torch.randn(3, 4)
        before = snapshot(model)
        with pytest.raises(mp.TraceError, match="Control flow on tensor values") as error:
            mp.convert(model, x)
        assert "test_convert.py" in str(error.value)
        assert "x.sum() > 0" in str(error.value)
        assert_untouched(model, before)

    def test_batch_norm_statistics_stay_frozen_and_are_used(self) -> None:
        model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4))
        model(torch.randn(100, 4) * 3 + 1)
        x = torch.randn(6, 4)
        out = mp.convert(model.train(), x)(x)
        bn = model[1]
        torch.testing.assert_close(out.mean, bn.eval()(x))
        torch.testing.assert_close(out.variance, x**2 / (bn.running_var + bn.eps))

    def test_the_input_is_not_changed_by_in_place_layers(self) -> None:
        model = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True))
        x = torch.randn(3, 4)
        kept = x.clone()
        mp.convert(model, x)(x)
        mp.monte_carlo(model, x, n_samples=3)
        assert torch.equal(x, kept)


class TestModule:
    def test_state_is_the_models_own(self) -> None:
        model = cnn().eval()
        bnn = mp.convert(model, torch.zeros(2, 3, 8, 8))
        assert list(bnn.state_dict()) == list(model.state_dict())
        assert bnn.get_parameter("0.weight") is model[0].weight
        x = torch.randn(2, 3, 8, 8)
        before = bnn(x).mean
        with torch.no_grad():
            model[9].bias += 1
        torch.testing.assert_close(bnn(x).mean, before + 1)  # shared: the change is seen
        other = copy.deepcopy(bnn)
        with torch.no_grad():
            model[9].bias -= 1
        torch.testing.assert_close(other(x).mean, before + 1)  # a copy keeps what it had
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other(x).mean, before)

    def test_another_dtype_or_device_gets_copies(self) -> None:
        model = cnn().eval()
        bnn = mp.convert(model, torch.zeros(2, 3, 8, 8))
        x = torch.randn(4, 3, 8, 8)
        single = bnn(x)
        double = bnn.double()(x.double())
        assert double.mean.dtype == torch.float64
        torch.testing.assert_close(double.mean.float(), single.mean)
        torch.testing.assert_close(double.variance.float(), single.variance)
        assert model[0].weight.dtype == torch.float32
        with pytest.raises(mp.InputError, match=r"must be torch\.float64"):
            bnn(x)
        on_meta = mp.convert(model, x).to("meta")(x.to("meta"))
        assert on_meta.mean.device.type == "meta"
        assert model[0].weight.device.type == "cpu"

    def test_tensors_made_inside_follow_device_and_dtype(self) -> None:
        class Makes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.constant = torch.tensor([1.0, 2.0])

            def forward(self, x):
                mask = torch.zeros(x.shape[0], 2, dtype=x.dtype, device=x.device)
                mask[:, 0] = 1
                return F.dropout(x, 0.5, self.training) * mask + self.constant

        x = torch.randn(3, 2)
        bnn = mp.convert(Makes(), x)
        expected = torch.tensor([1.0, 0.0]) * x + torch.tensor([1.0, 2.0])
        torch.testing.assert_close(bnn(x).mean, expected)
        assert bnn.to("meta")(x.to("meta")).mean.device.type == "meta"
        assert mp.convert(Makes(), x).double()(x.double()).mean.dtype == torch.float64

    def test_gradients_reach_input_and_the_models_parameters(self) -> None:
        model = cnn().eval()
        bnn = mp.convert(model, torch.zeros(2, 3, 8, 8))
        x = torch.randn(2, 3, 8, 8, requires_grad=True)
        out = bnn(x)
        (out.mean.sum() + out.variance.sum()).backward()
        for tensor in (x, *model.parameters()):
            assert tensor.grad is not None
            assert torch.isfinite(tensor.grad).all()

    def test_variance_gradient_is_right(self) -> None:
        bnn = mp.convert(mlp().double(), torch.zeros(2, 4).double())
        x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda v: (bnn(v).mean, bnn(v).variance), (x,))

    def test_exports_with_a_dynamic_batch(self) -> None:
        bnn = mp.convert(cnn().eval(), torch.zeros(2, 3, 8, 8))
        x = torch.randn(3, 3, 8, 8)
        with torch.no_grad():
            program = torch.export.export(bnn, (x,), dynamic_shapes={"args": ({0: torch.export.Dim.AUTO},)})
        y = torch.randn(7, 3, 8, 8)
        torch.testing.assert_close(program.module()(y).variance, bnn(y).variance)


class TestTracing:
    def test_functional_dropout_and_training_flags(self) -> None:
        class Functional(nn.Module):
            def forward(self, x):
                return F.dropout(x, 0.5, self.training)

        x = torch.ones(1, 2000)
        for model in (Functional().eval(), Functional().train()):
            torch.testing.assert_close(
                mp.convert(model, x, fidelity="paper")(x).variance, torch.ones(1, 2000)
            )

    def test_everything_before_the_first_dropout_is_deterministic(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Dropout(0.5))
        x = torch.randn(3, 4)
        out = mp.convert(model.eval(), x)(x)
        torch.testing.assert_close(out.mean, model(x))
        torch.testing.assert_close(out.variance, model(x) ** 2)

    def test_operators_without_a_rule_are_decomposed_when_that_helps(self) -> None:
        class Stacks(nn.Module):
            def forward(self, x):
                x = F.dropout(x, 0.5, self.training)
                return torch.hstack([torch.swapaxes(x, 1, 2).swapdims(1, 2), x.rot90(2, (1, 2))])

        x = torch.randn(2, 3, 4)
        out = mp.convert(Stacks().eval(), x)(x)
        torch.testing.assert_close(out.mean, Stacks().eval()(x))
        torch.testing.assert_close(out.variance, Stacks().eval()(x) ** 2)

    def test_spectral_norm_is_not_iterated(self) -> None:
        model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Dropout(0.5))
        x = torch.randn(2, 4)
        before = snapshot(model.train())
        out = mp.convert(model, x)(x)
        assert_untouched(model, before)
        torch.testing.assert_close(out.mean, model.eval()(x))

    def test_arguments_by_keyword_are_understood(self) -> None:
        class Keywords(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 3)

            def forward(self, x):
                x = F.dropout(input=x, p=0.5, training=self.training)
                return torch.ops.aten.linear.default(x, weight=self.linear.weight, bias=self.linear.bias)

        x = torch.randn(2, 4)
        model = Keywords()
        expected = x**2 @ (model.linear.weight**2).T
        torch.testing.assert_close(mp.convert(model, x)(x).variance, expected)

    def test_own_normalisation_layers_stay_in_eval_mode(self) -> None:
        """Recognised by the statistics they write while training."""

        class Norm(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("mu", torch.full((4,), 3.0))

            def forward(self, x):
                if self.training:
                    self.mu.mul_(0.9).add_(0.1 * x.mean(0))
                    return x - x.mean(0)
                return x - self.mu

        model = nn.Sequential(Norm(), nn.Dropout(0.5)).train()
        x = torch.randn(5, 4)
        before = snapshot(model)
        out = mp.convert(model, x)(x)
        assert_untouched(model, before)
        torch.testing.assert_close(out.mean, x - 3)

    def test_control_flow_before_the_first_dropout(self) -> None:
        class Branches(nn.Module):
            def forward(self, x):
                x = torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))
                return F.dropout(x, 0.5, self.training)

        x = torch.randn(3, 2).abs()
        bnn = mp.convert(Branches(), x, fidelity="fast")  # the whole batch decides about the branch
        torch.testing.assert_close(bnn(x).mean, x + 1)
        torch.testing.assert_close(bnn(-x).mean, -x - 1)
        mc = mp.monte_carlo(Branches(), x, n_samples=400)
        assert ((mc.mean - x - 1).abs() <= 5 * mc.mean_error).all()

    def test_any_signature(self) -> None:
        class Any(nn.Module):
            def forward(self, x, *more, scale=None, **named):
                return F.dropout(x, 0.5, self.training) * scale + more[0] - named["z"]

        x, y, z, scale = torch.randn(4, 3, 2)
        model = Any().eval()
        bnn = mp.convert(model, ((x, y), {"scale": scale, "z": z}))
        torch.testing.assert_close(bnn(x, y, z=z, scale=scale).mean, model(x, y, scale=scale, z=z))

    def test_a_keyword_given_by_position_and_the_other_way_round(self) -> None:
        class Masked(nn.Module):
            def forward(self, x, mask=None):
                return F.dropout(x, 0.5, self.training) * mask

        x, mask = torch.randn(2, 3, 4)
        by_name = mp.convert(Masked(), ((x,), {"mask": mask}))
        by_position = mp.convert(Masked(), (x, mask))
        for bnn in (by_name, by_position):
            torch.testing.assert_close(bnn(x, mask).mean, x * mask)
            torch.testing.assert_close(bnn(mask=mask, x=x).mean, x * mask)

    def test_the_flattening_idiom_with_an_empty_batch(self) -> None:
        class Flattens(nn.Module):
            def forward(self, x):
                return F.dropout(x, 0.5, self.training).view(x.size(0), -1).softmax(0)

        bnn = mp.convert(Flattens(), torch.zeros(2, 3, 4), fidelity="fast")
        assert bnn(torch.zeros(0, 3, 4)).shape == (0, 12)

    def test_dataclass_fields_that_init_does_not_take(self) -> None:
        @dataclasses.dataclass
        class Output:
            logits: torch.Tensor
            doubled: torch.Tensor = dataclasses.field(init=False)

            def __post_init__(self) -> None:
                self.doubled = self.logits * 2

        class Model(nn.Module):
            def forward(self, x):
                return Output(F.dropout(x, 0.5, self.training))

        x = torch.ones(2, 3)
        out = mp.convert(Model(), x)(x)
        torch.testing.assert_close(out.doubled.variance, 4 * out.logits.variance)


class TestAuto:
    def head(self, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(4, outputs))

    def test_accurate_up_to_64_outputs(self) -> None:
        x = torch.randn(2, 4)
        bnn = mp.convert(self.head(64), x)
        assert bnn.fidelity == "accurate"
        assert bnn(x).covariance.shape == (2, 64, 64)

    def test_says_so_beyond(self) -> None:
        x = torch.randn(2, 4)
        model = self.head(65)
        with pytest.warns(mp.FidelityNote, match="65 outputs per sample; choose some with outputs=") as notes:
            bnn = mp.convert(model, x)
        assert notes[0].filename == __file__  # the user's line
        assert len(notes) == 1
        assert bnn.fidelity == "accurate"
        assert "covariance of the 8 largest outputs" in bnn.summary().head
        torch.testing.assert_close(bnn(x).variance, mp.convert(model, x, outputs=8)(x).variance)
        assert bnn(x).covariance.shape == (2, 8, 8)
        assert mp.convert(model, x, "accurate")(x).covariance.shape == (2, 65, 65)  # asked for, it is done

    def test_too_many_to_choose_from(self) -> None:
        x = torch.randn(2, 4)
        model = nn.Sequential(self.head(2), nn.Upsample(scale_factor=10_000), nn.Flatten())
        model.insert(1, nn.Unflatten(1, (1, 2)))
        with pytest.warns(mp.FidelityNote, match="20000 outputs per sample"):
            bnn = mp.convert(model, x)
        assert bnn.fidelity == "fast"
        assert bnn(x).covariance is None

    def test_counts_all_outputs_together(self) -> None:
        model = Model(lambda m, x: (m.a(m.drop(x)), m.a(m.drop(x))), a=nn.Linear(4, 40))
        with pytest.warns(mp.FidelityNote, match="80 outputs per sample"):
            mp.convert(model, torch.randn(2, 4).double())

    def test_says_so_where_samples_mix(self) -> None:
        model = nn.Sequential(nn.Dropout(0.5), nn.Softmax(0))
        with pytest.warns(mp.FidelityNote, match="samples of the batch share noise or influence each other"):
            bnn = mp.convert(model, torch.randn(3, 4))
        assert bnn.fidelity == "fast"
        assert bnn(torch.randn(3, 4)).covariance is None

    def test_a_later_uncertain_input_stays_in_the_tier(self) -> None:
        x = torch.randn(2, 4)
        bnn = mp.convert(self.head(3), x)
        assert bnn(mp.Moments(x, 0.5)).covariance.shape == (2, 3, 3)
        with pytest.warns(mp.FidelityNote):
            bnn = mp.convert(self.head(100), x)
        assert bnn(mp.Moments(x, 0.5)).covariance.shape == (2, 8, 8)


@dataclasses.dataclass(slots=True)
class Batch:
    x: torch.Tensor
    past: torch.Tensor | None = None
    flag: bool = True


class TakesBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, batch: Batch) -> torch.Tensor:
        assert type(batch) is Batch
        return self.net(batch.x) if batch.flag else batch.x


class TestDataclassInputs:
    """Inputs that are instances of dataclasses are opened, as outputs are."""

    def test_in_every_way_to_call(self) -> None:
        model, x = TakesBatch().eval(), torch.randn(3, 4)
        plain = model.net
        expected = mp.convert(plain, x)(x)
        for example in (Batch(x), (Batch(x),), ((), {"batch": Batch(x)})):
            bnn = mp.convert(model, example)
            torch.testing.assert_close(bnn(Batch(x)).covariance, expected.covariance)
            assert bnn(batch=Batch(x[:2])).shape == (2, 3)
        assert mp.monte_carlo(model, Batch(x), 10).shape == (3, 3)
        uncertain = Batch(mp.Moments(x, 0.1))
        assert (mp.convert(model, uncertain)(uncertain).std > expected.std).all()

    def test_what_does_not_fit_is_named(self) -> None:
        x = torch.randn(3, 4)
        bnn = mp.convert(TakesBatch(), Batch(x))
        for given, message in (
            (x, r"structured like Batch\(.*not Tensor"),
            (Batch(x, x), r"inputs\[0\].past was None when traced and cannot be a tensor now"),
            (Batch(x[:, :3]), r"inputs\[0\].x must have shape \[batch, 4\]"),
            (Batch(x, flag=False), r"inputs\[0\].flag was True when traced"),
        ):
            with pytest.raises(mp.InputError, match=message):
                bnn(given)

    def test_files(self, tmp_path: Path) -> None:
        x = torch.randn(3, 4)
        bnn = mp.convert(TakesBatch(), Batch(x))
        mp.save(bnn, tmp_path / "net.pt2")
        loaded = mp.load(tmp_path / "net.pt2")
        torch.testing.assert_close(loaded(Batch(x)).covariance, bnn(Batch(x)).covariance)
