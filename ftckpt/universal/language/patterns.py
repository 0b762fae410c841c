"""Patterns over parameter names, and integer arithmetic on the values that they capture."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ftckpt.errors import SpecError

Value = int | str
_TOKENS = re.compile(r"\{(?P<name>[A-Za-z]\w*)(?::(?P<kind>\*\*?))?\}|(?P<any>\*\*)|(?P<part>\*)|(?P<text>[^*{]+|.)")
_WILD = {"**": r".*", "*": r"[^.]+"}
_VARIABLE = re.compile(r"\$(\w+)")
_PREFIX = "variable_"
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Pattern:
    """A pattern over complete names."""

    text: str
    regex: re.Pattern[str]

    @classmethod
    def glob(cls, text: str) -> Pattern:
        """A glob: ``*`` matches one part of a dotted name, ``**`` anything. ``{layer}`` captures a number,
        ``{what:*}`` and ``{what:**}`` capture a text.

        Raises:
            SpecError: two captures have one name.
        """
        pieces = []
        for token in _TOKENS.finditer(text):
            if token["name"]:
                pieces.append(f"(?P<{token['name']}>{_WILD[token['kind']] if token['kind'] else '[0-9]+'})")
            elif token["text"]:
                pieces.append(re.escape(token["text"]))
            else:
                pieces.append(_WILD[token[0]])
        try:
            return cls(text, re.compile("".join(pieces)))
        except re.error as error:
            raise SpecError(f"pattern {text!r}: {error}") from None

    def captures(self) -> frozenset[str]:
        """The names of its captures."""
        return frozenset(self.regex.groupindex)

    def match(self, name: str) -> dict[str, Value] | None:
        """The captures from ``name``, decimal numbers as int; None if it does not match."""
        match = self.regex.fullmatch(name)
        if match is None:
            return None
        values = {key: value for key, value in match.groupdict().items() if value is not None}
        return {key: int(value) if value.isdecimal() else value for key, value in values.items()}

    def before(self, name: str, capture: str) -> str:
        """The part of a matching name before the text of ``capture``."""
        match = self.regex.fullmatch(name)
        return name[: match.start(capture)] if match else ""


def evaluate(expression: str | int, values: Mapping[str, Value], variables: Mapping[str, int]) -> int:
    """The value of ``expression``, of integers, names in ``values``, ``$names`` in ``variables``, + - * // % and
    brackets.

    Raises:
        SpecError: anything else, or a name without a value.
    """
    if isinstance(expression, int):
        return expression
    # A prefix in place of ``$`` lets ``ast`` parse variables as names. Python evaluates nothing.
    text = _VARIABLE.sub(rf"{_PREFIX}\1", expression)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _evaluated(tree, values, variables)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
        raise SpecError(f"{expression!r} cannot be computed: {error}") from None
    except SpecError as error:
        raise SpecError(f"{expression!r}: {error}") from None


def _evaluated(node: ast.expr, values: Mapping[str, Value], variables: Mapping[str, int]) -> int:
    # ``type``, not isinstance: a bool is an int too.
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = (_evaluated(side, values, variables) for side in (node.left, node.right))
        return _OPERATIONS[type(node.op)](left, right)
    if isinstance(node, ast.Name) and node.id.startswith(_PREFIX):
        name = node.id.removeprefix(_PREFIX)
        if name in variables:
            return variables[name]
        raise SpecError(f"${name} has no value: the checkpoint does not give it; use --set {name}=VALUE")
    if isinstance(node, ast.Name):
        value = values.get(node.id)
        if isinstance(value, int):
            return value
        known = ", ".join(sorted(name for name, captured in values.items() if isinstance(captured, int)))
        raise SpecError(f"{node.id} is not a number; captured numbers: {known or 'none'} (variables start with $)")
    raise SpecError("only integers, names, $variables, + - * // % and brackets are allowed")


def variables_in(expression: str | int) -> frozenset[str]:
    """The names of the variables in an expression."""
    return frozenset(_VARIABLE.findall(str(expression)))


def fill_template(template: str, values: Mapping[str, Value], variables: Mapping[str, int]) -> str:
    """``template`` with each ``{...}`` replaced by a captured text or the value of an expression.

    Raises:
        SpecError: see ``evaluate``.
    """

    def replace(braces: re.Match[str]) -> str:
        inside = braces[1].strip()
        captured = values.get(inside)
        return captured if isinstance(captured, str) else str(evaluate(inside, values, variables))

    return re.sub(r"\{([^{}]*)\}", replace, template)
