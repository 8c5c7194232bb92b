import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from momentprop.moments import Moments, is_moments
from momentprop.rules.registry import Role
from properties import LinearRule, SampledRule
from rule_settings import C, Setting, X, normal, reason_of, setting

aten = torch.ops.aten


def mask(shape, generator):
    return torch.rand(shape, generator=generator) < 0.5


def fixed_value(*values):
    return lambda shape, generator: torch.tensor(values)


IMAGE = X(2, 4, 2, 2)

SAME_ELEMENTS = [
    setting(aten.alias.default, X(2, 3)),
    setting(aten.channel_shuffle.default, IMAGE, 2),
    setting(aten.clone.default, X(2, 3)),
    Setting(aten.clone.default, (IMAGE,), {"memory_format": torch.channels_last}, vectorizes=False),
    setting(aten.contiguous.default, X(2, 3)),
    setting(aten.flatten.using_ints, X(2, 3, 4)),
    setting(aten.flatten.using_ints, X(2, 3, 4), 1),
    setting(aten.flatten.using_ints, X(2, 3, 4), -3, -2),
    setting(aten.flip.default, X(2, 3, 4), [0, -1]),
    setting(aten.lift_fresh_copy.default, X(2, 3)),
    setting(aten.mT.default, X(2, 3, 4)),
    setting(aten.movedim.int, X(2, 3, 4), 0, -1),
    setting(aten.movedim.intlist, X(2, 3, 4), [0, 1], [1, 2]),
    setting(aten.numpy_T.default, X(2, 3)),
    setting(aten.permute.default, X(2, 3, 4), [2, 0, -2]),
    setting(aten.pixel_shuffle.default, IMAGE, 2),
    setting(aten.pixel_unshuffle.default, IMAGE, 2),
    setting(aten.reshape.default, X(2, 3, 4), [4, -1]),
    setting(aten.reshape_as.default, X(2, 6), C(3, 4)),
    setting(aten.roll.default, X(2, 3), [1]),
    setting(aten.roll.default, X(2, 3), [1, -1], [0, 1]),
    setting(aten.squeeze.default, X(1, 3, 1)),
    setting(aten.squeeze.dim, X(1, 3, 1), -1),
    setting(aten.squeeze.dim, X(1, 3, 1), 1),
    setting(aten.squeeze.dims, X(1, 3, 1), [0, -1]),
    setting(aten.swapaxes.default, X(2, 3, 4), 0, -1),
    setting(aten.swapdims.default, X(2, 3, 4), 1, 2),
    setting(aten.t.default, X(2, 3)),
    setting(aten.transpose.int, X(2, 3, 4), 0, -1),
    setting(aten.unflatten.int, X(2, 6), -1, [3, -1]),
    setting(aten.unsqueeze.default, X(2, 3), -1),
]

REPEATED_ELEMENTS = [
    setting(aten.expand.default, X(1, 3), [2, -1, 3]),
    setting(aten.broadcast_to.default, X(1, 3), [2, 4, 3]),
    setting(aten.diag_embed.default, X(2, 3), 1),
    setting(aten.expand_as.default, X(3), C(2, 3)),
    setting(aten.im2col.default, X(1, 2, 4, 4), [2, 2], [1, 1], [1, 1], [2, 2]),
    setting(aten.im2col.default, X(2, 4, 4), [3, 2], [1, 1], [0, 0], [1, 2]),
    setting(aten.reflection_pad1d.default, X(2, 3, 4), [2, 1]),
    setting(aten.reflection_pad2d.default, X(2, 4, 3), [1, 2, 0, 3]),
    setting(aten.reflection_pad3d.default, X(1, 1, 2, 3, 2), [1, 0, 2, 1, 0, 1]),
    setting(aten.repeat.default, X(2, 3), [2, 1, 2]),
    setting(aten.repeat_interleave.self_int, X(2, 3), 2, -1),
    setting(aten.repeat_interleave.self_int, X(2, 3), 2),
    setting(aten.replication_pad1d.default, X(3, 4), [5, 1]),
    setting(aten.replication_pad2d.default, X(1, 2, 2, 3), [1, 2, 0, 3]),
    setting(aten.replication_pad3d.default, X(1, 2, 3, 2), [1, 0, 2, 1, 0, 1]),
    setting(aten.tile.default, X(2, 3), [2, 1, 2]),
    setting(aten.unfold.default, X(2, 7), -1, 3, 2),
    setting(aten.upsample_nearest1d.default, X(1, 2, 3), [5]),
    setting(aten.upsample_nearest1d.vec, X(1, 2, 3), None, [2.0]),
    setting(aten.upsample_nearest2d.default, X(1, 2, 3, 2), [5, 4]),
    setting(aten.upsample_nearest2d.vec, X(1, 2, 3, 2), None, [2.0, 1.5]),
    setting(aten.upsample_nearest2d.vec, X(1, 2, 3, 2), [6, 2], None),
    setting(aten.upsample_nearest3d.default, X(1, 1, 2, 2, 2), [3, 4, 2]),
    setting(aten.upsample_nearest3d.vec, X(1, 1, 2, 2, 2), None, [2.0, 1.0, 2.0]),
]

SOME_ELEMENTS = [
    setting(aten.chunk.default, X(2, 7), 3, -1),
    setting(aten.diagonal.default, X(3, 4)),
    setting(aten.diagonal.default, X(2, 3, 4), 1, -2, -1),
    setting(aten.take_along_dim.default, X(2, 3), C(2, 2, make=fixed_value([0, 2], [1, 1])), 1),
    setting(aten.gather.default, X(2, 3), 1, C(2, 2, make=fixed_value([0, 2], [1, 1]))),
    setting(aten.index.Tensor, X(3, 4), [C(2, make=fixed_value(2, 0))]),
    setting(aten.index.Tensor, X(3, 4), [None, C(3, make=fixed_value(3, 3, -1))]),
    setting(aten.index.Tensor, X(3, 4), [C(2, 1, make=fixed_value([2], [0])), C(2, make=fixed_value(1, 3))]),
    setting(aten.index_select.default, X(3, 4), -1, C(3, make=fixed_value(3, 0, 0))),
    setting(aten.narrow.default, X(3, 4), -1, 1, 2),
    setting(aten.select.int, X(3, 4), -1, -2),
    setting(aten.slice.Tensor, X(5, 2)),
    setting(aten.slice.Tensor, X(5, 2), 0, 1, -1, 2),
    setting(aten.slice.Tensor, X(5, 2), -1, 0, 1),
    setting(aten.split.Tensor, X(5, 2), 2),
    setting(aten.split.Tensor, X(2, 5), 3, -1),
    setting(aten.split.sizes, X(5, 2), [1, 4]),
    setting(aten.split_with_sizes.default, X(2, 5), [2, 0, 3], -1),
    setting(aten.tril.default, X(3, 4)),
    setting(aten.tril.default, X(2, 3, 3), -1),
    setting(aten.triu.default, X(3, 4), 1),
    setting(aten.unbind.int, X(2, 3), -1),
]

MASKED = [
    setting(aten.masked_fill.Scalar, X(3, 4), C(3, 4, make=mask), -2.5),
    setting(aten.where.self, C(3, 4, make=mask), X(3, 4), X(4)),
    setting(aten.where.self, C(3, 1, make=mask), X(3, 4), C(3, 4)),
    setting(aten.where.ScalarOther, C(4, make=mask), X(3, 4), -1.5),
    setting(aten.where.ScalarSelf, C(3, 4, make=mask), 2.0, X(3, 4)),
    setting(aten.masked_fill.Scalar, X(3, 4), C(4, make=mask), 1),
    setting(aten.masked_fill.Tensor, X(3, 4), C(3, 1, make=mask), C()),
]

JOINED = [
    setting(aten.cat.default, [X(2, 3), X(2, 1)], -1),
    setting(aten.cat.default, [X(2, 3), C(1, 3), X(2, 3)]),
    setting(aten.cat.default, [C(2, 3, make=mask), X(2, 3)], 1),
    setting(aten.stack.default, [X(2, 3), C(2, 3), X(2, 3)]),
    setting(aten.stack.default, [C(2), X(2)], -1),
    setting(aten.diagonal_scatter.default, X(3, 4), X(3)),
    setting(aten.diagonal_scatter.default, C(3, 4), X(3), 1),
    setting(aten.select_scatter.default, X(3, 4), C(3), 1, -1),
    setting(aten.select_scatter.default, C(3, 4), X(4), 0, 1),
    setting(aten.slice_scatter.default, X(5, 2), X(2, 2), 0, 1, None, 2),
    setting(aten.slice_scatter.default, C(5, 2), X(5, 1), -1, 1),
    Setting(aten.slice_scatter.default, (X(5, 2), C(2, 2), 0, -2), vectorizes=False, n_samples=1000),
]

PADDED = [
    setting(aten.pad.default, X(2, 3), [1, 2]),
    setting(aten.pad.default, X(2, 3), [1, 0, 0, 2], "constant", -1.5),
    setting(aten.pad.default, X(2, 3), [0, -1], "constant", 2.0),
    setting(aten.pad.default, X(1, 2, 3), [1, 2], "reflect"),
    setting(aten.pad.default, X(1, 2, 3), [1, 2], "replicate"),
    setting(aten.pad.default, X(1, 2, 3), [1, 2], "circular"),
    setting(aten.constant_pad_nd.default, X(2, 3), [1, 2]),
    setting(aten.constant_pad_nd.default, X(2, 3), [1, 2, 0, 1], 3.5),
    setting(aten.constant_pad_nd.default, X(2, 3), [-1, 1], 1),
]

CAST = [
    setting(aten._to_copy.default, X(2, 3)),
    setting(aten.to.device, X(2, 3), "cpu", torch.float64),
    setting(aten.to.dtype, X(2, 3), torch.float64),
    setting(aten.to.dtype_layout, X(2, 3), dtype=torch.float64),
    setting(aten.to.other, X(2, 3), C(1)),
    setting(aten.type_as.default, X(2, 3), C(1)),
]

COPIED = [
    setting(aten.copy.default, C(2, 3, make=normal), X(3)),
    setting(aten.copy.default, C(2, 3, make=normal), X(2, 3), True),
]

VIEWS = [
    setting(aten.view.default, X(2, 3, 4), [-1, 4]),
    setting(aten._unsafe_view.default, X(2, 3, 4), [6, 4]),
    setting(aten.view_as.default, X(2, 6), C(3, 4)),
]

# Two functions of families.py make the rules of these: `reshape` and `rearrangement`.
FAMILIES = SAME_ELEMENTS + REPEATED_ELEMENTS + SOME_ELEMENTS + JOINED
# All properties are tested where these functions branch: lists that come in or go out, constants among
# the values, several values, indices.
REPRESENTATIVES = [
    setting(aten.flatten.using_ints, X(2, 3, 4), -3, -2),
    setting(aten.alias.default, X(2, 3)),
    setting(aten.roll.default, X(2, 3), [1, -1], [0, 1]),
    setting(aten.numpy_T.default, X(2, 3)),
    setting(aten.permute.default, X(2, 3, 4), [2, 0, -2]),
    setting(aten.upsample_nearest2d.vec, X(1, 2, 3, 2), None, [2.0, 1.5]),
    setting(aten.split.Tensor, X(2, 5), 3, -1),
    setting(aten.index.Tensor, X(3, 4), [None, C(3, make=fixed_value(3, 3, -1))]),
    setting(aten.cat.default, [X(2, 3), C(1, 3), X(2, 3)]),
    setting(aten.diagonal_scatter.default, C(3, 4), X(3), 1),
    setting(aten.slice_scatter.default, X(5, 2), X(2, 2), 0, 1, None, 2),
]
SETTINGS = FAMILIES + VIEWS + MASKED + PADDED + COPIED

# What these return depends on the shapes and types of their arguments alone.
QUERIES = [
    setting(aten.empty_like.default, X(2, 3)),
    setting(aten.full_like.default, X(2, 3), 1.5),
    setting(aten.full_like.default, X(2, 3), 2, dtype=torch.int64),
    setting(aten.new_empty.default, X(2, 3), [4]),
    setting(aten.new_full.default, X(2, 3), [4], 1.5),
    setting(aten.new_ones.default, X(2, 3), [4]),
    setting(aten.new_zeros.default, X(2, 3), [4], dtype=torch.int64),
    setting(aten.ones_like.default, X(2, 3)),
    setting(aten.sym_numel.default, X(2, 3)),
    setting(aten.sym_size.int, X(2, 3), -1),
    setting(aten.zeros_like.default, X(2, 3)),
    setting(aten.fill.Scalar, X(2, 3), 1.5),
    setting(aten.fill.Tensor, X(2, 3), C()),
]

# No gradient passes it, by definition.
DETACHED = setting(aten.detach.default, X(2, 3))


@pytest.mark.parametrize("setting", REPRESENTATIVES + VIEWS + MASKED + PADDED + COPIED, ids=str)
class TestShape(LinearRule):
    draws = 1  # values are only moved


def variance_or_zero(value):
    """The variance of a value, which is 0 for a constant; an index is no value."""
    if is_moments(value):
        return value.variance
    is_value = isinstance(value, torch.Tensor) and value.dtype in (torch.float64, torch.bool)
    return torch.zeros_like(value) if is_value else value


def check_mean_and_variance_are_moved_alike(setting):
    args = setting.arguments()
    variances = pytree.tree_map(variance_or_zero, args, is_leaf=is_moments)
    moved = zip(setting.propagate(args), setting.apply(args), setting.apply(variances), strict=True)
    for out, mean, variance in moved:
        assert torch.equal(out.mean, mean), "the operator is applied to the mean"
        assert torch.equal(out.variance, variance), "the operator is applied to the variance"
        assert out.variance.dtype == mean.dtype, "type of the output"


@pytest.mark.parametrize("setting", FAMILIES, ids=str)
def test_families(setting):
    """The operator itself moves means and variances, so what holds for values of any kind holds here."""
    check_mean_and_variance_are_moved_alike(setting)
    SampledRule().test_linear_part(setting)
    assert reason_of(setting) is None, "the rule accepts its arguments"


@pytest.mark.parametrize("setting", QUERIES, ids=str)
def test_shape_queries_are_deterministic(setting):
    args = setting.arguments(torch.float32)
    out, plain = setting.rule(*args, **setting.kwargs), setting.op(args[0].mean, *args[1:], **setting.kwargs)
    assert setting.rule.role is Role.SHAPE
    assert reason_of(setting) is None
    if not isinstance(plain, torch.Tensor):
        assert out == plain
        return
    assert isinstance(out, torch.Tensor)
    assert (out.shape, out.dtype) == (plain.shape, plain.dtype)
    assert "empty" in str(setting.op) or torch.equal(out, plain)


def test_detach_stops_gradients():
    (x,) = DETACHED.arguments()
    x.mean.requires_grad_()
    out = DETACHED.rule(x)
    assert torch.equal(out.mean, x.mean)
    assert torch.equal(out.variance, x.variance)
    assert not out.mean.requires_grad


@pytest.mark.parametrize("setting", CAST, ids=str)
class TestCast:
    def test_casts_both_moments(self, setting):
        (x, *_), (_, *rest) = setting.arguments(torch.float32), setting.arguments(torch.float64)
        out = setting.rule(x, *rest, **setting.kwargs)
        reference = setting.op(x.mean, *rest, **setting.kwargs)
        assert out.mean.dtype == out.variance.dtype == reference.dtype
        assert torch.equal(out.mean, reference)
        assert torch.equal(out.variance, x.variance.to(reference.dtype))

    def test_accepts_floating_point(self, setting):
        assert reason_of(setting) is None


@pytest.mark.parametrize(
    "refused",
    [
        setting(aten._to_copy.default, X(2), dtype=torch.int64),
        setting(aten.to.device, X(2), "cpu", torch.int32),
        setting(aten.to.dtype, X(2), torch.bool),
        setting(aten.to.dtype_layout, X(2), dtype=torch.uint8),
        setting(aten.to.other, X(2), C(1, make=fixed_value(1))),
        setting(aten.type_as.default, X(2), C(1, make=fixed_value(1))),
    ],
    ids=str,
)
def test_rounding_is_refused(refused):
    assert "cast of a random tensor to torch." in reason_of(refused)


def test_rounding_is_refused_by_type_of_a_graph_node():
    """While a graph is checked, tensors are nodes with an example value."""
    node = fx.Graph().placeholder("other")
    rule = setting(aten.type_as.default).rule
    for dtype in (torch.int64, torch.float64):
        node.meta["val"] = torch.zeros(1, dtype=dtype)
        reason = rule.refuses({"self": None, "other": node}, frozenset({"self"}))
        assert (reason is None) == dtype.is_floating_point


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (aten.gather.default, "index"),
        (aten.index.Tensor, "indices"),
        (aten.masked_fill.Tensor, "value"),
        (aten.fill.Tensor, "value"),
        (aten.index_select.default, "index"),
    ],
    ids=str,
)
def test_random_index_or_value_is_refused(op, name):
    assert f"{name} is random" in setting(op).rule.refuses({}, frozenset({"self", name}))


@pytest.mark.parametrize(
    "op",
    [aten.reshape_as.default, aten.view_as.default, aten.expand_as.default, aten.type_as.default],
    ids=str,
)
def test_tensor_that_lends_its_shape_may_be_random(op):
    x, other = torch.randn(2, 3), Moments(torch.randn(2, 3), 1.0)
    out = setting(op).rule(x, other)
    assert torch.equal(out.mean, x)
    assert not out.variance.any()
    refuses = setting(op).rule.refuses
    assert refuses is None or refuses({}, frozenset({"self", "other"})) is None


def test_copy_takes_the_shape_and_type_of_its_target():
    target = Moments(torch.randn(2, 3, dtype=torch.float64), 1.0)
    out = setting(aten.copy.default).rule(target, torch.ones(3))
    assert out.dtype == out.variance.dtype == torch.float64
    assert torch.equal(out.mean, torch.ones(2, 3, dtype=torch.float64))
    assert not out.variance.any()


def test_masked_logits_stay_masked():
    x = Moments(torch.zeros(2), 1.0)
    out = setting(aten.masked_fill.Scalar).rule(x, torch.tensor([True, False]), float("-inf"))
    assert out.mean.tolist() == [float("-inf"), 0.0]
    assert out.variance.tolist() == [0.0, 1.0]


def test_view_of_other_strides():
    """A rule may return strides the operator would not have: its output still has to be viewed."""
    x = Moments(torch.randn(3, 2).t(), torch.rand(3, 2).t())
    out = setting(aten.view.default).rule(x, [6])
    assert torch.equal(out.mean, x.mean.reshape(6))
    assert torch.equal(out.variance, x.variance.reshape(6))


def test_lists_come_back_as_lists_of_moments():
    out = setting(aten.split.Tensor).rule(Moments(torch.randn(4, 2), 1.0), 2)
    assert isinstance(out, list)
    assert all(map(is_moments, out))
