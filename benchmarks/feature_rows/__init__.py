"""The rows of ``benchmarks/features.py``: a module for each feature."""

from __future__ import annotations

from feature_rows import compress, fusion, hooks, in_process, layers, moe, observe, overlap, pipeline, transfer, verify
from feature_rows.row import Place, Row

ROWS: list[Row] = [
    *moe.ROWS,
    *overlap.ROWS,
    *transfer.ROWS,
    *compress.ROWS,
    *layers.ROWS,
    *hooks.ROWS,
    *pipeline.ROWS,
    *fusion.ROWS,
    *verify.ROWS,
    *observe.ROWS,
    *in_process.ROWS,
]


def by_name(names: str) -> list[Row]:
    """The rows of the features in a comma-separated list.

    All rows if it is empty. An unknown feature is a ValueError.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {row.name for row in ROWS}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"--only {unknown[0]}: no such feature, expected one of {', '.join(sorted(known))}")
    return [row for row in ROWS if not wanted or row.name in wanted]


__all__ = ["ROWS", "Place", "Row", "by_name"]
