"""Operators that move values or ask for shapes: views, joins, slices, padding, casts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from momentprop.graph.ops import FILLED
from momentprop.moments import Moments, is_moments, mean_of, variance_of
from momentprop.rules.families import (
    by_position,
    in_same_order,
    only_random,
    rearrangement,
    reshape,
    shape_query,
)
from momentprop.rules.linearization import Propagated, Pull, gathered, mapped
from momentprop.rules.moves import (
    cast,
    cut,
    expanded,
    joined,
    narrowed,
    permuted,
    selected,
    sliced,
    stacked,
    swapped,
    unbound,
)
from momentprop.rules.registry import EXACT, MOVES_VALUES, Role, rule

aten = torch.ops.aten

# the same elements in the same order
reshape(
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.flatten.using_ints,
    aten.lift_fresh_copy.default,
    aten.reshape.default,
    aten.reshape_as.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unflatten.int,
    aten.unsqueeze.default,
)

# the same elements in another order
rearrangement(aten.permute.default, pull=permuted)
rearrangement(aten.transpose.int, aten.t.default, aten.swapaxes.default, aten.swapdims.default, pull=swapped)
rearrangement(
    aten.mT.default,
    aten.numpy_T.default,
    aten.channel_shuffle.default,
    aten.flip.default,
    aten.movedim.int,
    aten.movedim.intlist,
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    aten.roll.default,
)

# the same elements, some several times
rearrangement(aten.broadcast_to.default, aten.expand.default, aten.expand_as.default, pull=expanded)
rearrangement(
    aten.im2col.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.repeat.default,
    aten.repeat_interleave.self_int,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    aten.tile.default,
    aten.unfold.default,
    aten.upsample_nearest1d.default,
    aten.upsample_nearest1d.vec,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_nearest3d.default,
    aten.upsample_nearest3d.vec,
)

# some of the elements, or zero in their place
rearrangement(aten.slice.Tensor, pull=sliced)
rearrangement(aten.narrow.default, pull=narrowed)
rearrangement(aten.select.int, pull=selected)
rearrangement(
    aten.chunk.default,
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    pull=cut,
)
rearrangement(aten.unbind.int, pull=unbound)
rearrangement(
    aten.diag_embed.default,
    aten.diagonal.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.take_along_dim.default,
    aten.tril.default,
    aten.triu.default,
)

# several tensors joined, or one written into another
rearrangement(aten.cat.default, pull=joined)
rearrangement(aten.stack.default, pull=stacked)
rearrangement(
    aten.diagonal_scatter.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    values=2,
)


def _refuses_rounding(arguments: Mapping[str, Any], _: frozenset[str]) -> str | None:
    other = arguments.get("other")  # a tensor, or the node of a graph that stands for one
    dtype = arguments.get("dtype") or getattr(getattr(other, "meta", {}).get("val", other), "dtype", None)
    if dtype is not None and not dtype.is_floating_point:
        return f"a cast of a random tensor to {dtype} has no rule"
    return None


# casts from floating point to floating point
rearrangement(
    aten._to_copy.default,
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.other,
    aten.type_as.default,
    refuses=_refuses_rounding,
    pull=cast,
)

# the result depends on shape, dtype and device alone
shape_query(*FILLED, aten.sym_numel.default, aten.sym_size.int)


# Rules may leave other strides than the traced operators did, so a view is a reshape here.
@rule(aten.view.default, aten._unsafe_view.default, exactness=EXACT, reference=MOVES_VALUES)
def view(x: Moments, size: list[int]) -> Propagated:
    return in_same_order(Moments(x.mean.reshape(size), x.variance.reshape(size)), x)


@rule(aten.view_as.default, exactness=EXACT, reference=MOVES_VALUES)
def view_as(x: Any, other: Any) -> Propagated:
    size = mean_of(other).shape
    return in_same_order(Moments(mean_of(x).reshape(size), variance_of(x).reshape(size)), x, other)


def _cropped(padding: list[int]) -> Pull:
    return lambda cotangent: [aten.constant_pad_nd.default(cotangent, [-p for p in padding])]


@rule(aten.pad.default, exactness=EXACT, reference=MOVES_VALUES)
def pad(x: Moments, padding: list[int], mode: str = "constant", value: float | None = None) -> Propagated:
    """Constant padding puts its value into the mean and zero into the variance."""
    variance = aten.pad.default(x.variance, padding, mode)
    out = Moments(aten.pad.default(x.mean, padding, mode, value), variance)
    if mode == "constant":
        return Propagated(out, lambda: mapped(_cropped(padding)))
    return Propagated(out, lambda: mapped(by_position(aten.pad.default, 1)(out, x, padding, mode)))


@rule(aten.constant_pad_nd.default, exactness=EXACT, reference=MOVES_VALUES)
def constant_pad_nd(x: Moments, padding: list[int], value: float = 0) -> Propagated:
    mean = aten.constant_pad_nd.default(x.mean, padding, value)
    out = Moments(mean, aten.constant_pad_nd.default(x.variance, padding))
    return Propagated(out, lambda: mapped(_cropped(padding)))


@rule(
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    exactness=EXACT,
    reference=MOVES_VALUES,
    refuses=only_random("self"),
)
def masked_fill(x: Moments, mask: Tensor, value: Any) -> Propagated:
    shape = x.shape
    out = Moments(x.mean.masked_fill(mask, value), x.variance.masked_fill(mask, 0.0))
    return Propagated(out, lambda: mapped(lambda c: [gathered(c.masked_fill(mask, 0.0), shape)]))


@rule(
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    exactness=EXACT,
    reference=MOVES_VALUES,
    refuses=only_random("self", "other"),
)
def where(condition: Tensor, x: Any, y: Any) -> Propagated:
    """One or the other, by a deterministic condition."""
    mean = torch.where(condition, mean_of(x), mean_of(y))
    out = Moments(mean, torch.where(condition, variance_of(x), variance_of(y)).to(mean.dtype))
    shapes = [v.shape if is_moments(v) else None for v in (x, y)]

    def pull(cotangent: Tensor) -> list[Tensor]:
        kept = [torch.where(condition, cotangent, 0.0), torch.where(condition, 0.0, cotangent)]
        return [gathered(c, shape) for shape, c in zip(shapes, kept, strict=True) if shape is not None]

    return Propagated(out, lambda: mapped(pull))


@rule(aten.copy.default, exactness=EXACT, reference=MOVES_VALUES)
def copy(x: Any, source: Any, non_blocking: bool = False) -> Propagated:
    """The source in the shape and type of x, whose values are overwritten."""
    target = mean_of(x)

    def like_target(values: Tensor) -> Tensor:  # aten.copy itself has no derivative
        return values.to(target).expand_as(target)

    def pull(cotangent: Tensor) -> list[Tensor | None]:
        overwritten: list[Tensor | None] = [None] if is_moments(x) else []
        if not is_moments(source):
            return overwritten
        return [*overwritten, gathered(cotangent, source.shape).to(source.mean)]

    out = Moments(like_target(mean_of(source)), like_target(variance_of(source)))
    return Propagated(out, lambda: mapped(pull))


@rule(
    aten.fill.Scalar,
    aten.fill.Tensor,
    exactness=EXACT,
    reference="deterministic",
    refuses=only_random("self"),
    role=Role.SHAPE,
)
def fill(x: Any, value: Any) -> Tensor:
    return torch.full_like(mean_of(x), value)
