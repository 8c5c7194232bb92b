"""The traced network is the model of eval mode plus its dropout, whatever else training changes."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop.capture.trace import Trace, trace
from momentprop.graph.ops import DROPOUTS
from small import assert_untouched, snapshot

Both = namedtuple("Both", ["logits", "auxiliary"])


def n_dropouts(made: Trace) -> int:
    return sum(n.target in DROPOUTS for n in made.graph.nodes)


class Base(nn.Module):
    """A hidden layer with dropout, and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output, self.other = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.2)

    def features(self, x: Tensor) -> Tensor:
        return self.dropout(torch.relu(self.hidden(x)))


class AuxiliaryHead(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return Both(self.output(h), self.other(h)) if self.training else self.output(h)


class AuxiliaryHeadFirst(Base):
    """And a dropout that only this class can switch off."""

    def forward(self, x: Tensor) -> Any:
        h = F.dropout(self.features(x), 0.1, self.training)
        auxiliary = {"aux": self.other(h)} if self.training else {}
        return {**auxiliary, "out": self.output(h)}


class Loss(Base):
    def forward(self, x: Tensor) -> Any:
        out = self.output(self.features(x))
        return (out, out.square().mean()) if self.training else (out,)


class Masked(Base):
    """A deterministic part of the input is hidden while training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mask = torch.zeros(x.shape)
            mask[:, 1:3] = 1
            x = torch.where(mask.bool(), torch.zeros(()), x)
        return self.output(self.features(x))


class MaskedAtRandom(Base):
    """As SpecAugment does it: spans drawn outside of torch, which cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            import numpy as np

            spans = np.random.default_rng(0).integers(0, 4, (int(x.abs().sum()) + 1,))
            x = x.index_fill(1, torch.from_numpy(spans), 0.0)
        return self.output(self.features(x))


class OneMoreOutput(Base):
    """A cache, which training does without."""

    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return (self.output(h),) if self.training else (self.output(h), torch.relu(self.hidden(x)))


class Standardises(nn.Module):
    """A leaf that uses the batch's statistics while training, and keeps none."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.training else x


def with_leaf() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2), Standardises())


MODELS = [AuxiliaryHead, AuxiliaryHeadFirst, Loss, Masked, MaskedAtRandom, OneMoreOutput, with_leaf]


@pytest.mark.parametrize("build", MODELS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("batch", [1, 5])
def test_returns_what_eval_mode_returns(build: Any, batch: int) -> None:
    model, x = build().train(), torch.randn(batch, 4)
    before = snapshot(model)
    bnn = mp.convert(model, x, fidelity="fast")
    assert_untouched(model, before)
    expected, out = model.eval()(x), bnn(x)
    leaves, spec = torch.utils._pytree.tree_flatten(expected)
    found, found_spec = torch.utils._pytree.tree_flatten(out, is_leaf=lambda v: isinstance(v, mp.Moments))
    assert spec == found_spec
    idle = mp.convert(model, x, fidelity="paper")
    for value, moments in zip(leaves, found, strict=True):
        assert moments.shape == value.shape
    # the output layer is linear, so its mean is that of eval mode if features are
    last = found[-1] if build is AuxiliaryHeadFirst else found[0]
    mean = leaves[-1] if build is AuxiliaryHeadFirst else leaves[0]
    torch.testing.assert_close(last.mean, mean)
    assert last.variance.any()
    assert idle.fidelity == "paper"


@pytest.mark.parametrize("build", MODELS, ids=lambda f: f.__name__)
def test_keeps_its_dropout(build: Any) -> None:
    made = trace(build(), torch.randn(3, 4))
    assert n_dropouts(made) == (2 if build is AuxiliaryHeadFirst else 1)
    used = {name.split(".")[0] for name in made.state}
    assert "other" not in used  # the auxiliary head is not part of it


class TestWhatCannotBeHelped:
    def test_dropout_lost_with_a_class_is_said(self) -> None:
        class Own(Base):
            def forward(self, x: Tensor) -> Tensor:
                h = F.dropout(self.features(x), 0.1, self.training)
                return self.output(h - 1 if self.training else h)

        with pytest.warns(mp.TraceNote, match=r"Own \(1\).*left out"):
            made = trace(Own(), torch.randn(3, 4))
        assert n_dropouts(made) == 1

    def test_noise_with_another_mean_stays_and_is_said(self) -> None:
        class Unscaled(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * (torch.rand_like(x) < 0.5) if self.training else x

        x = torch.randn(3, 4)
        with pytest.warns(mp.TraceNote, match="other values than in eval mode"):
            bnn = mp.convert(nn.Sequential(Unscaled()), x)
        torch.testing.assert_close(bnn(x).mean, x / 2)

    def test_other_shapes_are_an_error(self) -> None:
        class Grows(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                y = F.dropout(x, 0.5, self.training)
                return torch.cat([y, y + torch.rand_like(y)], 1) if self.training else y

        # a leaf that draws random numbers: it may be a kind of dropout
        model = nn.Sequential(Grows())
        with pytest.warns(mp.TraceNote, match=r"Grows \(1\)"), pytest.raises(mp.NoDropoutError):
            mp.convert(model, torch.randn(3, 4))

    def test_a_model_that_runs_in_neither_mode(self) -> None:
        class Broken(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x @ x

        with pytest.raises(mp.TraceError, match="Check that the model runs"):
            trace(Broken(), torch.randn(3, 4))

    def test_a_branch_on_values_is_reported_without_the_whole_graph(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        class Branches(Base):
            def forward(self, x: Tensor) -> Tensor:
                h = self.features(x)
                return self.output(h if h.sum() > 0 else -h)

        with pytest.raises(mp.TraceError, match="Control flow on tensor values"):
            trace(Branches(), torch.randn(3, 4))
        assert capfd.readouterr() == ("", "")

    def test_what_a_model_prints_itself_is_seen(self, capsys: pytest.CaptureFixture[str]) -> None:
        class Prints(Base):
            def forward(self, x: Tensor) -> Tensor:
                if torch.compiler.is_exporting():
                    print("seen", file=sys.stderr)
                return self.output(self.features(x))

        trace(Prints(), torch.randn(3, 4))
        assert capsys.readouterr().err == "seen\n"


class TestRunningInEvalMode:
    """The model is run once; nothing of that may be left."""

    def test_buffers_caches_lists_and_counters(self) -> None:
        class Remembers(Base):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("count", torch.zeros(()))
                self.plain, self.calls, self.cache, self.seen = torch.zeros(2), 0, {}, []

            def forward(self, x: Tensor) -> Tensor:
                if not torch.compiler.is_exporting():
                    self.count += 1
                    self.plain.add_(1)
                    self.calls += 1
                    self.cache["x"] = x
                    self.seen.append(x)
                    self.last = x
                    self.register_forward_hook(lambda *_: None)
                return self.output(self.features(x))

        model, x = Remembers(), torch.randn(2, 4)
        before = snapshot(model)
        trace(model, x)
        assert_untouched(model, before)
        assert model.calls == 0
        assert not model.plain.any()
        assert model.cache == {}
        assert model.seen == []
        assert not hasattr(model, "last")

    def test_hooks_that_a_model_installs_while_traced(self) -> None:
        class Installs(Base):
            def forward(self, x: Tensor) -> Tensor:
                self.hidden.register_forward_hook(lambda *_: None)
                return self.output(self.features(x))

        model, x = Installs(), torch.randn(2, 4)
        before = snapshot(model)
        trace(model, x)
        assert_untouched(model, before)

    def test_an_input_written_to(self) -> None:
        class Writes(Base):
            def forward(self, x: Tensor) -> Tensor:
                return self.output(self.features(x.mul_(2)))

        x = torch.randn(2, 4)
        kept = x.clone()
        trace(Writes(), x)
        assert torch.equal(x, kept)

    def test_dropout_that_no_flag_switches_off(self) -> None:
        """The eval-mode model is random itself: values are not compared, but structures are."""

        class Always(Base):
            def forward(self, x: Tensor) -> Any:
                h = F.dropout(self.features(x), 0.5)
                return (self.output(h), self.other(h)) if self.training else self.output(h)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made = trace(Always(), torch.randn(2, 4))
        assert n_dropouts(made) == 2
        assert made.out_spec.is_leaf()

    def test_padding_that_the_fused_path_of_eval_mode_leaves_out(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.TransformerEncoder(layer, 2).eval()
        padding = torch.tensor([[False, False, True], [False, False, False]])
        x = torch.randn(2, 3, 8)
        made = trace(model, ((x,), {"src_key_padding_mask": padding}))
        assert n_dropouts(made) == 8
        assert torch.backends.mha.get_fastpath_enabled()

    def test_a_causal_mask_given_to_a_decoder(self) -> None:
        class Translates(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                return self.net(x, y, tgt_mask=nn.Transformer.generate_square_subsequent_mask(y.shape[1]))

        assert n_dropouts(trace(Translates(), (torch.randn(2, 3, 8), torch.randn(2, 4, 8)))) == 10


class TestRegions:
    """Parts under another gradient or autocast mode are parts like others."""

    class Rotary(Base):
        @torch.no_grad()
        def angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", enabled=False):
                angle = x.float().cos()
            return angle, angle.sin()

        def forward(self, x: Tensor) -> Tensor:
            cos, sin = self.angles(x)
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                h = self.features(x).mul_(2)
            return self.output(h) * cos[:, :3] + sin[:, :3]

    @pytest.mark.parametrize("grad", [False, True])
    def test_are_inlined(self, grad: bool) -> None:
        model, x = self.Rotary(), torch.randn(3, 4)
        with torch.set_grad_enabled(grad):
            made = trace(model, x)
        assert not any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in made.graph.nodes)
        assert n_dropouts(made) == 1
        torch.testing.assert_close(mp.convert(model, x, fidelity="fast")(x).mean, model.eval()(x))

    def test_an_enabled_autocast_is_not(self) -> None:
        """Its casts happen when it runs."""

        class Casts(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    y = x @ x.T
                return F.dropout(y.float(), 0.5, self.training)

        made = trace(Casts(), torch.randn(3, 4))
        names = [str(n.target) for n in made.graph.nodes]
        assert "wrap_with_autocast" in names


def test_a_batch_of_one_keeps_its_numbers() -> None:
    """Indices stay valid, and values can be compared."""

    class Picks(nn.Module):
        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            picked = x[torch.arange(x.shape[0]), index - 1]  # 0 would be another element
            return F.dropout(picked, 0.5, self.training)

    x, index = torch.randn(1, 3, 2), torch.tensor([2])
    bnn = mp.convert(Picks(), (x, index))
    torch.testing.assert_close(bnn(x, index).mean, x[:, 1])


def test_outputs_that_are_no_tensors_become_none() -> None:
    """As caches do, that a decoder returns beside its predictions; said once."""

    class Cache:
        def __init__(self, keys: Tensor) -> None:
            self.keys = keys

    class Model(Base):
        def forward(self, x: Tensor) -> Any:
            h = self.features(x)
            return {"logits": self.output(h - 1 if self.training else h), "past": Cache(h), "n": 3}

    model, x = Model().eval(), torch.randn(2, 4)
    with pytest.warns(mp.TraceNote, match="hold Cache, not a tensor") as said:
        bnn = mp.convert(model, x, fidelity="fast")
    assert len(said) == 1
    out = bnn(x)
    assert out["past"] is None
    assert out["n"] == 3
    torch.testing.assert_close(out["logits"].mean, model(x)["logits"])


@dataclasses.dataclass
class Record:
    logits: Tensor
    loss: Tensor | None = None


def test_a_field_that_is_none_in_eval_mode() -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Record:
            out = self.output(self.features(x))
            return Record(out, out.sum() if self.training else None)

    model, x = Model(), torch.randn(2, 4)
    out = mp.convert(model, x, fidelity="fast")(x)
    assert type(out) is Record
    assert out.loss is None
    torch.testing.assert_close(out.logits.mean, model.eval()(x).logits)
