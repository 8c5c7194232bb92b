"""momentprop ops: every operator that has a rule."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

import momentprop.rules  # noqa: F401  (registers the rules)
from momentprop import tiers
from momentprop.cli.tables import print_table
from momentprop.rules.registry import RULES, Rule


def _tiers_of(rule: Rule) -> str:
    using = [tier.name for tier in tiers.ALL if tier.rules.find(rule.op) is rule]
    return "all" if len(using) == len(tiers.ALL) else ", ".join(using)


def ops(
    part: Annotated[str, typer.Argument(help="Only operators with this in their name.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the operators that noise can pass, with how exact each rule is and where it comes from."""
    rows = [
        {
            "operator": str(rule.op),
            "tier": _tiers_of(rule),
            "exactness": rule.exactness,
            "reference": rule.reference,
        }
        for rule in RULES
        if part.lower() in str(rule.op).lower()
    ]
    if not rows:
        Console(stderr=True).print(f"no rule for an operator with {part!r} in its name", markup=False)
        raise typer.Exit(1)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    title = f"{len(rows)} rule{'s' * (len(rows) > 1)}"
    print_table(title, list(rows[0]), [list(row.values()) for row in rows], names=4)
