"""Formulas become MathML when the pages are built: browsers show it without a script and without a network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.errors import ExtensionError

# Docutils knows sizes with a side only, \bigl( and not \big(, and no \dots.
_SIZE = re.compile(r"\\([bB]igg?)(?![a-zA-Z])")


def _plain(formula: str) -> str:
    return re.sub(r"\\dots(?![a-zA-Z])", r"\\ldots", _SIZE.sub(r"\\\1l", formula))


def _convert(node: Any, is_block: bool) -> str:
    try:
        return str(tex2mathml(_plain(node.astext()), as_block=is_block))
    except MathError as error:
        raise ExtensionError(f"{node.source}: {error} in the formula {node.astext()!r}") from error


def _inline(writer: Any, node: Any) -> None:
    writer.body.append(_convert(node, False))
    raise nodes.SkipNode


def _block(writer: Any, node: Any) -> None:
    writer.body.append(writer.starttag(node, "div", CLASS="math notranslate nohighlight"))
    writer.body.append(_convert(node, True))
    writer.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Makes ``mathml`` a renderer of formulas."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
