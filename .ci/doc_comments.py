"""For the API reference: turns the comment forms of the sources into forms that its generator reads."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

#: An example in a docstring: from `Example::` to the next line that is not indented.
EXAMPLE = re.compile(r"^Example::\n\n((?:(?: {4}.*)?(?:\n|$))+)", re.M)


class DocComments(griffe.Extension):
    """Comments that begin with ``#:`` describe the attribute below them; ``Example::`` begins a block of Python."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Handles an attribute; griffe calls this for every attribute that it has found."""
        if attr.docstring is not None or attr.lineno is None:
            return
        lines = attr.lines_collection[attr.filepath]
        comment: list[str] = []
        for line in reversed(lines[: attr.lineno - 1]):
            stripped = line.strip()
            if not stripped.startswith("#:"):
                break
            comment.insert(0, stripped.removeprefix("#:").strip())
        if comment:
            attr.docstring = griffe.Docstring(" ".join(comment), parent=attr)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Handles any object; griffe calls this for everything that it has found."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(
                lambda found: f"```python\n{textwrap.dedent(found[1]).strip()}\n```\n", obj.docstring.value
            )
