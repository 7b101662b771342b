"""The pages on fusion, determinism and the API: their examples run as they stand, the files that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import Context, beyond_gloo, run_fresh

ROOT = Path(__file__).resolve().parents[3]
PAGES = ["fusion.md", "determinism.md", "api.md"]

pytestmark = beyond_gloo("the pages are about this package")


def example(ctx: Context, page: str, source: str) -> None:
    ctx.init()
    exec(compile(source, page, "exec"), {"rank": ctx.rank})


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_the_page_run(page: str) -> None:
    """Every Python block, one after the other, on two ranks."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)
    assert blocks
    run_fresh(example, 2, page, "\n".join(blocks))


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_pages_that_it_names_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = re.findall(r"`((?:src|cpp|torch_ext|tests|benchmarks)/[\w./]+)`", text)
    linked = re.findall(r"\]\(([\w.]+\.md)[)#]", text)
    assert named and linked
    assert all((ROOT / name).exists() for name in named), named
    assert all((ROOT / "docs" / name).is_file() for name in linked), linked
