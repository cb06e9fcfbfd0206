"""Chat templates that write messages as they are: proved from the template's source."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from rollwright.errors import require

# What an expression of a template may be: independent of what messages say; what a message says, perhaps stripped; the
# same within other text; a message, or a list of them.
_Kind = Literal["other", "text", "built", "messages"]
_ENDS = frozenset({"startswith", "endswith"})
_STRIPS = frozenset({"strip", "lstrip", "rstrip"})
_OF_LISTS = frozenset({"length", "count", "first", "last", "list", "reverse"})
_OF_TYPES = frozenset({"string", "defined", "undefined", "none", "mapping", "iterable", "sequence"})
_CHANGING = frozenset({"strftime_now", "random", "now", "cycler", "joiner"})


class _NotVerbatim(Exception):
    """The template looks into what a message says."""


class Verbatim(NamedTuple):
    """Which texts of messages a template writes as they are, perhaps stripped of white space.

    Two chats whose messages differ in such texts alone are written alike, but for these texts. No such text is empty or
    white space, holds one of ``looked_for`` (``</think>``, say), or begins or ends with a character of ``edges``.
    """

    looked_for: frozenset[str]
    edges: frozenset[str]

    def holds(self, text: str) -> bool:
        """Whether ``text`` is such a text."""
        if not text or text.isspace() or text[0] in self.edges or text[-1] in self.edges:
            return False
        return not any(part in text for part in self.looked_for)


def written_verbatim(source: str) -> Verbatim | None:
    """Which texts of messages a template writes as they are.

    Each expression of the template is checked; what is not known to be harmless is not.

    Args:
        source: of the template.

    Returns:
        None: it may look into any.
    """
    jinja2 = require("jinja2", extra="llm", purpose="chat templates")
    plain = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", source)
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        proof = _Proof(jinja2.nodes)
        proof.check(environment.parse(plain))
    except (_NotVerbatim, jinja2.TemplateError):
        return None
    return Verbatim(frozenset(proof.looked_for), frozenset(proof.edges))


class _Proof:
    def __init__(self, nodes: Any) -> None:
        self._nodes = nodes
        self._names: dict[str, _Kind] = {"messages": "messages"}
        self.looked_for: set[str] = set()
        self.edges: set[str] = set()

    def check(self, tree: Any) -> None:
        names: dict[str, _Kind] = {}
        while names != self._names:  # a name may be used above the place where it is assigned, in a loop
            names = dict(self._names)
            self._statements(tree.body)

    def _statements(self, body: list[Any]) -> None:
        for node in body:
            self._statement(node)

    def _statement(self, node: Any) -> None:
        nodes = self._nodes
        if isinstance(node, nodes.Output):
            for part in node.nodes:
                if self._kind(part) == "messages":
                    raise _NotVerbatim
        elif isinstance(node, nodes.If):
            self._branches(node)
        elif isinstance(node, nodes.For):
            kind = self._kind(node.iter)
            if (
                kind in ("text", "built")
                or node.recursive
                or (node.test is not None and self._kind(node.test) == "messages")
            ):
                raise _NotVerbatim
            self._assign(node.target, kind)
            self._statements(node.body)
            self._statements(node.else_)
        elif isinstance(node, nodes.Assign):
            self._assign(node.target, self._kind(node.node))
        elif not isinstance(node, nodes.Break | nodes.Continue):
            raise _NotVerbatim  # macros, blocks, and others

    def _branches(self, node: Any) -> None:
        """If, elif and else, without those for messages that are no strings."""
        for part in (node, *node.elif_):
            is_text = self._asks_for_string(part.test)
            self._kind(part.test)
            if is_text is not False and not self._asks_for_a_part(part.test):
                self._statements(part.body)
            if is_text:
                return
        self._statements(node.else_)

    def _asks_for_string(self, test: Any) -> bool | None:
        """What a test for the type of a message's text gives: the text is a string."""
        nodes = self._nodes
        if isinstance(test, nodes.Not):
            inner = self._asks_for_string(test.node)
            return None if inner is None else not inner
        if isinstance(test, nodes.Test) and test.name == "string" and self._kind(test.node) == "text":
            return True
        return None

    def _asks_for_a_part(self, test: Any) -> bool:
        """Whether a test fails for each text that contains nothing of what is looked for."""
        nodes = self._nodes
        if isinstance(test, nodes.And):
            return self._asks_for_a_part(test.left) or self._asks_for_a_part(test.right)
        if isinstance(test, nodes.Call) and isinstance(test.node, nodes.Getattr):
            return test.node.attr in _ENDS and self._kind(test.node.node) == "text"
        return isinstance(test, nodes.Compare) and self._looks_for(test) is not None

    def _looks_for(self, node: Any) -> str | None:
        """The text that a comparison looks for within what a message says."""
        nodes = self._nodes
        if len(node.ops) == 1 and node.ops[0].op == "in" and self._kind(node.ops[0].expr) == "text":
            return node.expr.value or None if isinstance(node.expr, nodes.Const) else None
        return None

    def _assign(self, target: Any, kind: _Kind) -> None:
        nodes = self._nodes
        if isinstance(target, nodes.Name):
            before = self._names.get(target.name, "other")
            self._names[target.name] = _either(before, kind)
        elif kind != "other":
            raise _NotVerbatim

    def _kind(self, node: Any) -> _Kind:
        nodes = self._nodes
        if isinstance(node, nodes.Name):
            if node.name in _CHANGING:
                raise _NotVerbatim
            return self._names.get(node.name, "other")
        if isinstance(node, nodes.Getattr):
            return self._member(self._kind(node.node), node.attr, node.node)
        if isinstance(node, nodes.Getitem):
            return self._item(node)
        if isinstance(node, nodes.Call):
            return self._call(node)
        if isinstance(node, nodes.Filter):
            return self._filter(node)
        if isinstance(node, nodes.Test):
            kind = self._kind(node.node)
            if kind != "other" and node.name not in _OF_TYPES:
                raise _NotVerbatim
            return self._plain(node.args)
        if isinstance(node, nodes.Compare):
            return self._compare(node)
        if isinstance(node, nodes.CondExpr):
            self._kind(node.test)
            return self._joined([node.expr1] if node.expr2 is None else [node.expr1, node.expr2])
        if isinstance(node, nodes.Not):
            self._kind(node.node)
            return "other"
        if isinstance(node, nodes.And | nodes.Or):
            return self._joined([node.left, node.right])
        if isinstance(node, nodes.Add | nodes.Concat):
            kind = self._joined(node.nodes if isinstance(node, nodes.Concat) else [node.left, node.right])
            return "built" if kind == "text" else kind
        return self._plain(list(node.iter_child_nodes()))

    def _member(self, kind: _Kind, name: str, owner: Any) -> _Kind:
        if kind in ("text", "built") or name in ("items", "values", "keys"):
            raise _NotVerbatim
        if kind == "messages":
            return "text" if name == "content" else "other"
        if isinstance(owner, self._nodes.Name) and owner.name == "loop" and name in ("previtem", "nextitem"):
            return "messages"
        if name == "content":  # of something that is not known to be a message
            raise _NotVerbatim
        return "other"

    def _item(self, node: Any) -> _Kind:
        nodes = self._nodes
        kind = self._kind(node.node)
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            return self._member(kind, node.arg.value, node.node)
        self._plain([node.arg])
        if kind in ("text", "built"):
            raise _NotVerbatim
        return kind

    def _call(self, node: Any) -> _Kind:
        nodes = self._nodes
        callee, args = node.node, node.args
        if isinstance(callee, nodes.Getattr):
            kind = self._kind(callee.node)
            if kind == "text" and callee.attr in _ENDS and len(args) == 1 and isinstance(args[0], nodes.Const):
                self.looked_for.add(str(args[0].value))
                return "other"
            if kind in ("text", "built"):
                if callee.attr not in _STRIPS or not all(isinstance(arg, nodes.Const) for arg in args):
                    raise _NotVerbatim
                self.edges.update(*(str(arg.value) for arg in args))
                return kind
            if kind == "messages":
                if callee.attr != "get" or not isinstance(args[0], nodes.Const):
                    raise _NotVerbatim
                found = self._member(kind, args[0].value, callee.node)
                self._plain(args[1:])
                return found
        return self._plain(list(node.iter_child_nodes()))

    def _filter(self, node: Any) -> _Kind:
        if node.node is None or node.name in _CHANGING:
            raise _NotVerbatim
        kind = self._kind(node.node)
        self._plain([*node.args, *node.kwargs])
        if kind in ("text", "built"):
            if node.name != "trim" or node.args or node.kwargs:
                raise _NotVerbatim
        elif kind == "messages":
            if node.name not in _OF_LISTS:
                raise _NotVerbatim
            return "other" if node.name in ("length", "count") else "messages"
        return kind

    def _compare(self, node: Any) -> _Kind:
        """Comparisons of what messages do not say; ``"name" in message`` asks for a key."""
        nodes = self._nodes
        if (sought := self._looks_for(node)) is not None:
            self.looked_for.add(sought)
            return "other"
        operands = [operand.expr for operand in node.ops]
        if self._kind(node.expr) != "other":
            raise _NotVerbatim
        for operand, place in zip(node.ops, operands, strict=True):
            kind = self._kind(place)
            key = isinstance(node.expr, nodes.Const) and operand.op in ("in", "notin")
            if kind in ("text", "built") or (kind == "messages" and not key):
                raise _NotVerbatim
        return "other"

    def _joined(self, parts: list[Any]) -> _Kind:
        found: _Kind = "other"
        for part in parts:
            found = _either(found, self._kind(part))
        return found

    def _plain(self, parts: list[Any]) -> _Kind:
        """``"other"``, where no part says what messages say."""
        for part in parts:
            if self._kind(part) != "other":
                raise _NotVerbatim
        return "other"


def _either(first: _Kind, second: _Kind) -> _Kind:
    """What is one or the other."""
    if first == second or second == "other":
        return first
    if first == "other":
        return second
    if "messages" in (first, second):
        raise _NotVerbatim
    return "built"
