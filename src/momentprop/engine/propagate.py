"""The forward sweep: a traced graph whose operators are replaced by their rules."""

from __future__ import annotations

from torch import fx

from momentprop.capture.trace import Trace
from momentprop.passes.coverage import rule_of
from momentprop.rules.registry import Lookup


def propagate(trace: Trace, rules: Lookup) -> fx.GraphModule:
    """A program program(*state, *inputs) -> flat outputs on plain tensors and Moments.

    A rule given plain tensors runs its operator, so one program serves deterministic and uncertain
    inputs; what no noise reaches is computed by plain kernels. Generated as straight-line Python code,
    it runs, compiles and exports without interpreting anything.
    """
    graph = trace.copy_graph()
    for node in graph.nodes:
        if (rule := rule_of(node, rules)) is not None:
            node.target = rule
    return fx.GraphModule(trace.root, graph, "Program")
