"""Operators without a rule, where the user asked for it: first order, or a small sample.

`unsupported="linearize"`: mean f(E), variance diag(J diag(V) J^T) with J the Jacobian at E, and J again for
the deviations. J comes from PyTorch's own derivatives, traced at conversion (site.py). Where f works element
by element, J is a diagonal. Elsewhere the variance is a sum of squares (J d)^2 over deviations d: one for
each element of a sample if it has up to 64, which is exact; otherwise one for each of 61 groups of
elements, with a fixed sign for every element, which estimates it without bias. Where PyTorch has no
derivative to multiply deviations with, J d is half the difference of f at E + d and E - d.

`unsupported="sample"`: f at 32 fixed points and their mirror images, N(E, V) element by element; mean and
variance are those of the results. Points outside the domain of f, where it is not finite, are left out. For
the deviations, Stein's E[f'] (local.py): where f works element by element, by regression of f on its input;
elsewhere J on average over 16 points, and noise for what changes f alike in a point and its mirror image.

Measured against large samples: element by element, mean to 0.02 std and std to 6 % (sinc over one std);
elsewhere mean to 0.1 std, std to 15 %, in tier `accurate` 25 % (sort, the worst of those tried;
log-cumsum-exp 2 %).

Results that are no real numbers (indices, comparisons) are taken at the mean and count as known.

Both know of nothing but the variances of the inputs, and take elements as uncorrelated, as rules do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from momentprop.capture.trace import place_of
from momentprop.errors import MissingRuleError
from momentprop.graph.private import OpOverload
from momentprop.graph.reach import creates_noise
from momentprop.passes.coverage import FALLBACK, RULE
from momentprop.passes.stand_ins.fallback import AtMean, Fallback
from momentprop.passes.stand_ins.linearized import Linearized, LinearizedPointwise
from momentprop.passes.stand_ins.sampled import Sampled, SampledPointwise
from momentprop.passes.stand_ins.site import Site
from momentprop.rules.registry import Role, Rule

UNSUPPORTED = ("error", "linearize", "sample")
_SHAPED_BY_DATA = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def mark(nodes: Sequence[fx.Node], unsupported: str) -> None:
    """Say of these nodes, which have no rule, what to do about it; of some, nothing can be done."""
    for node in nodes:
        op = node.target
        if not isinstance(op, OpOverload) or creates_noise(node):
            continue
        if not any(tag in op.tags for tag in _SHAPED_BY_DATA):
            node.meta[FALLBACK] = unsupported


def attach(graph: fx.Graph, random: set[fx.Node], accurate: bool) -> None:
    """Give a rule of its own to every marked node that noise reaches."""
    failed = []
    for node in graph.nodes:
        if FALLBACK not in node.meta or random.isdisjoint(node.all_input_nodes):
            continue
        try:
            node.meta[RULE] = _rule(node, random, accurate)
        except Exception as error:  # whatever PyTorch says about a derivative
            first = (str(error).splitlines() or [type(error).__name__])[0]
            failed.append(place_of(node, f"unsupported={node.meta[FALLBACK]!r} does not help: {first}"))
    if failed:
        raise MissingRuleError(failed)


def _rule(node: fx.Node, random: set[fx.Node], accurate: bool) -> Rule:
    method = node.meta[FALLBACK]
    site = Site.of(node, random)
    reference = f"unsupported={method!r}"
    if not any(site.results) or not site.inputs:
        at_mean = AtMean(site)
        return Rule(site.op, at_mean, "taken at the mean", reference, role=Role.SHAPE)
    pointwise = torch.Tag.pointwise in site.op.tags and not site.is_list
    made: Fallback
    if method == "sample":
        made = SampledPointwise(site) if pointwise else Sampled(site, accurate)
    else:
        made = LinearizedPointwise(site) if pointwise else Linearized(site, accurate)
    return Rule(site.op, made, made.exactness, reference, local=made.local)
