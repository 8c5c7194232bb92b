"""Operators that move values or ask for shapes: views, joins, slices, padding, casts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments, is_moments, mean_of, variance_of
from momentprop.rules.families import (
    by_position,
    gathered,
    only_random,
    rearrangement,
    reshape,
    same_order,
    shape_query,
)
from momentprop.rules.local import Linear, Local
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
from momentprop.rules.shared import direction_of, share

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
rearrangement(aten.permute.default, local=permuted)
rearrangement(aten.transpose.int, aten.t.default, local=swapped)
rearrangement(
    aten.channel_shuffle.default,
    aten.flip.default,
    aten.movedim.int,
    aten.movedim.intlist,
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    aten.roll.default,
)

# the same elements, some several times
rearrangement(aten.broadcast_to.default, aten.expand.default, aten.expand_as.default, local=expanded)
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
rearrangement(aten.slice.Tensor, local=sliced)
rearrangement(aten.narrow.default, local=narrowed)
rearrangement(aten.select.int, local=selected)
rearrangement(
    aten.chunk.default,
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    local=cut,
)
rearrangement(aten.unbind.int, local=unbound)
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
rearrangement(aten.cat.default, local=joined)
rearrangement(aten.stack.default, local=stacked)
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
    local=cast,
)

# the result depends on shape, dtype and device alone
shape_query(
    aten.empty_like.default,
    aten.full_like.default,
    aten.new_empty.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones_like.default,
    aten.sym_numel.default,
    aten.sym_size.int,
    aten.zeros_like.default,
)


# Rules may leave other strides than the traced operators did, so a view is a reshape here.
@rule(aten.view.default, aten._unsafe_view.default, exactness=EXACT, reference=MOVES_VALUES, local=same_order)
def view(x: Moments, size: list[int]) -> Moments:
    return share(Moments(x.mean.reshape(size), x.variance.reshape(size)), direction_of(x))


@rule(aten.view_as.default, exactness=EXACT, reference=MOVES_VALUES, local=same_order)
def view_as(x: Any, other: Any) -> Moments:
    size = mean_of(other).shape
    return Moments(mean_of(x).reshape(size), variance_of(x).reshape(size))


def _cropped(
    out: Moments, x: Moments, padding: list[int], mode: str = "constant", value: float | None = None
) -> Local:
    if mode != "constant":
        return by_position(aten.pad.default, 1)(out, x, padding, mode)
    return Linear(lambda cotangent: [aten.constant_pad_nd.default(cotangent, [-p for p in padding])])


@rule(aten.pad.default, exactness=EXACT, reference=MOVES_VALUES, local=_cropped)
def pad(x: Moments, padding: list[int], mode: str = "constant", value: float | None = None) -> Moments:
    """Constant padding puts its value into the mean and zero into the variance."""
    variance = aten.pad.default(x.variance, padding, mode)
    return Moments(aten.pad.default(x.mean, padding, mode, value), variance)


@rule(
    aten.constant_pad_nd.default,
    exactness=EXACT,
    reference=MOVES_VALUES,
    local=lambda out, x, padding, value=0: _cropped(out, x, padding),
)
def constant_pad_nd(x: Moments, padding: list[int], value: float = 0) -> Moments:
    return Moments(
        aten.constant_pad_nd.default(x.mean, padding, value),
        aten.constant_pad_nd.default(x.variance, padding),
    )


def _unmasked(out: Moments, x: Moments, mask: Tensor, value: Any) -> Linear:
    shape = x.shape
    return Linear(lambda cotangent: [gathered(cotangent.masked_fill(mask, 0.0), shape)])


@rule(
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    exactness=EXACT,
    reference=MOVES_VALUES,
    refuses=only_random("self"),
    local=_unmasked,
)
def masked_fill(x: Moments, mask: Tensor, value: Any) -> Moments:
    return Moments(x.mean.masked_fill(mask, value), x.variance.masked_fill(mask, 0.0))


def _chosen(out: Moments, condition: Tensor, x: Any, y: Any) -> Linear:
    shapes = [v.shape if is_moments(v) else None for v in (x, y)]

    def pull(cotangent: Tensor) -> list[Tensor]:
        kept = [torch.where(condition, cotangent, 0.0), torch.where(condition, 0.0, cotangent)]
        return [gathered(c, shape) for shape, c in zip(shapes, kept, strict=True) if shape is not None]

    return Linear(pull)


@rule(
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    exactness=EXACT,
    reference=MOVES_VALUES,
    refuses=only_random("self", "other"),
    local=_chosen,
)
def where(condition: Tensor, x: Any, y: Any) -> Moments:
    """One or the other, by a deterministic condition."""
    mean = torch.where(condition, mean_of(x), mean_of(y))
    return Moments(mean, torch.where(condition, variance_of(x), variance_of(y)).to(mean.dtype))


def _from_source(out: Moments, x: Any, source: Any, non_blocking: bool = False) -> Linear:
    def pull(cotangent: Tensor) -> list[Tensor | None]:
        overwritten: list[Tensor | None] = [None] if is_moments(x) else []
        if not is_moments(source):
            return overwritten
        return [*overwritten, gathered(cotangent, source.shape).to(source.mean)]

    return Linear(pull)


@rule(aten.copy.default, exactness=EXACT, reference=MOVES_VALUES, local=_from_source)
def copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    """The source in the shape and type of x, whose values are overwritten."""
    target = mean_of(x)

    def like_target(values: Tensor) -> Tensor:  # aten.copy itself has no derivative
        return values.to(target).expand_as(target)

    return Moments(like_target(mean_of(source)), like_target(variance_of(source)))


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
