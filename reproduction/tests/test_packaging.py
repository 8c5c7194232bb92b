"""What is installed beside the library."""

from __future__ import annotations

from importlib import metadata

from momentprop.cli.verbs import GROUP, REPRODUCTION


def test_the_verbs_are_those_that_the_library_misses_without_us() -> None:
    entries = metadata.distribution("momentprop-reproduction").entry_points.select(group=GROUP)
    assert tuple(sorted(entry.name for entry in entries)) == REPRODUCTION


def test_one_version_for_both() -> None:
    assert metadata.version("momentprop-reproduction") == metadata.version("momentprop")
