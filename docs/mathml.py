"""Formulas as MathML, which browsers show without a script and without a network.

Text in single backticks is a formula if it looks like one, such as `H u = g` or `A`, and code
otherwise: docstrings are read in terminals as well, where the markup of formulas is a nuisance.
Code that is a name of the reference becomes a link to it.
"""

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx import addnodes

GREEK = "alpha beta gamma delta epsilon eta theta lambda mu pi rho sigma tau phi chi".split()
FUNCTIONS = "log exp sqrt norm diag det abs min max sum inv mean trace".split()
# A letter alone, or what no code has: juxtaposed letters, superscripts, and spaces around signs.
SIGNS = r"[-+/<=]|<=|<"
FORMULA = re.compile(rf"(?:[A-Za-z]|.*(?:[\w)'] [A-Z(a-z]|\^|[\w)'] (?:{SIGNS}|\.) [\w(-]).*)")
CODE = re.compile(
    r"""["@\[\]:?`{]|_bar|\*\*|\.\w*[a-zA-Z(]|[a-z]=|=[a-zA-Z]|__|\w{2,}_\w{2,}\(|\b(?:import|python|for)\b"""
    r"""|\([\w ,.*]+,\)?|\bto_|[a-z]{3,}\((?!.*[\^'])\w+\)$""",
    re.VERBOSE,
)
# A name, but not that of a function after which an argument is called.
NAME = re.compile(r"(?!recompute$)[A-Za-z]\w*(?:\.\w+)*")
TOKEN = re.compile(
    rf"(?:{'|'.join(GREEK)})(?![a-z])|[a-z]{{3,}}(?:_[a-z]{{2,}})*|[A-Za-z]+|\^-?\w|<=|>=|."
)


def formula(text: str) -> str:
    """Return a formula in LaTeX for what docstrings write; nothing if it is code."""
    braced = re.sub(r"([_^])\{([^{}]*)\}", r"\1", text)
    if not FORMULA.fullmatch(text) or CODE.search(braced):
        return ""

    def written(match: re.Match[str]) -> str:
        token = match.group()
        if token in GREEK:
            return f"\\{token} "
        if token in FUNCTIONS:
            return rf"\operatorname{{{token}}}"
        if len(token) > 2 and token[0].isalpha():
            return rf"\text{{{token}}}"
        return {"<=": r"\le ", ">=": r"\ge ", "*": r"\cdot ", " ": r"\,"}.get(
            token, f"^{{{token[1:]}}}" if token[0] == "^" and len(token) > 1 else token
        )

    return TOKEN.sub(written, text.replace(" . ", " * "))


def _text(name: str, rawtext: str, text: str, line: int, inliner: Any, *rest: Any) -> Any:
    """Role of text in single backticks."""
    content = text.replace("\\", "")
    latex = formula(content)
    if latex:
        return [nodes.math(rawtext, latex)], []
    literal = nodes.literal(rawtext, content)
    if not NAME.fullmatch(content):
        return [literal], []
    environment = inliner.document.settings.env
    context = {"py:module": "hvp", "py:class": environment.ref_context.get("py:class")}
    where = {"refdomain": "py", "reftype": "obj", "refdoc": environment.docname}
    # What has no place in the reference, such as an argument, stays the literal.
    return [addnodes.pending_xref(rawtext, literal, reftarget=content, **where, **context)], []


def _inline(translator: Any, node: Any) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(translator: Any, node: Any) -> None:
    formula = convert(node.astext(), display="block")
    translator.body.append(f'<div class="math">{formula}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer; `html_math_renderer = "mathml"` chooses it."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.add_role("text", _text)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
