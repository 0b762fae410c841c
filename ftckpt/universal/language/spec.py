"""The language that says where the parameters of a checkpoint lie, for checkpoints that do not say it themselves.

A specification is a YAML file of rules; ``specs/README.md`` explains them all. It is checked for completeness: each
name must match exactly one rule, and each rule at least one name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ftckpt.errors import SpecError
from ftckpt.universal.language.patterns import Pattern, Value, evaluate, variables_in
from ftckpt.universal.language.rules import Rule, expression, fields_of, parse_rule

READY = Path(__file__).parent / "specs"
_MOST_NAMED = 8

Matches = Mapping[str, tuple[Rule, Pattern, Mapping[str, Value]]]
"""Name → the rule that it matches, the pattern of the rule that did, and what that captured."""


@dataclass(frozen=True)
class Variable:
    """A number that the checkpoint's arguments give under one of the names ``sources``, else ``default``."""

    sources: tuple[str, ...]
    default: str | int | None = None


@dataclass(frozen=True)
class Spec:
    """Rules for the names of one kind of checkpoint. ``variants`` are other names for the same kind of model: the one
    that fits a checkpoint is taken."""

    origin: str
    rules: tuple[Rule, ...] = ()
    variants: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    variables: Mapping[str, Variable] = field(default_factory=dict)
    given: Mapping[str, int] = field(default_factory=dict)
    told: list[str] = field(default_factory=list, compare=False)
    """Which rule matched how many names, in words, once names were matched."""

    @classmethod
    def load(cls, name: str | Path, given: Mapping[str, int] | None = None) -> Spec:
        """The ready specification ``name``, or that of a file; ``given`` are variables that win over all others.

        Raises:
            SpecError: there is none, or it is wrong; the text names the rule and the field.
        """
        ready = {path.stem: path for path in sorted(READY.glob("*.yaml"))}
        path = ready.get(str(name), Path(name))
        try:
            value = yaml.safe_load(path.read_text())
        except FileNotFoundError:
            raise SpecError(f"{name}: no such file, nor is it one of {', '.join(ready)}") from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise SpecError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
        return cls.parse(value, str(name), given)

    @classmethod
    def parse(cls, value: Any, origin: str, given: Mapping[str, int] | None = None) -> Spec:
        """A specification from what its YAML says; ``origin`` names it in errors. Raises SpecError, see ``load``."""
        body = fields_of(value, origin, {"about", "variables", "rules", "variants"})
        if ("rules" in body) == ("variants" in body):
            raise SpecError(f"{origin}: has to have either rules or variants")
        rules = {"": body["rules"]} if "rules" in body else fields_of(body["variants"], f"{origin}: variants")
        parsed = {name: _rules(found, f"{origin}: {name}" if name else origin) for name, found in rules.items()}
        variables = _variables(body.get("variables") or {}, f"{origin}: variables")
        unknown = sorted(name for name in given or () if name not in variables and f"${name}" not in str(value))
        if unknown:
            told = f"known are {', '.join(sorted(variables)) or 'none'}"
            raise SpecError(f"{origin}: no rule uses a variable {', '.join(unknown)}; {told}")
        return cls(origin, parsed.pop("", ()), parsed, variables, dict(given or {}))

    def resolve(self, names: Iterable[str], arguments: Mapping[str, Any]) -> Spec:
        """This specification with the rules that count for a checkpoint of these names: of the variant that fits.

        Raises:
            SpecError: none does; the text says what is wrong with the one that fits best.
        """
        found, values = sorted(set(names)), self.values(arguments)
        errors: list[tuple[int, str]] = []
        for variant, rules in ({"": self.rules} if self.rules else self.variants).items():
            where = f"{self.origin}, variant {variant}" if variant else self.origin
            counting = tuple(rule for rule in rules if _counts(rule, where, values))
            problems, bad = _problems(counting, found)
            if not problems:
                return replace(self, rules=counting, variants={})
            errors.append((bad, f"{where}: {'; '.join(problems)}"))
        raise SpecError(min(errors)[1])

    def match(self, names: Iterable[str], arguments: Mapping[str, Any]) -> Matches:
        """The rule of each name. Raises SpecError, see ``resolve``."""
        found = sorted(set(names))
        rules = self.resolve(found, arguments).rules
        matches = {name: (rule, *hit) for name in found for rule in rules if (hit := rule.match(name)) is not None}
        numbers = [rule.number for rule, _, _ in matches.values()]
        self.told[:] = [f"rule {r.number}, {r.kind}: {numbers.count(r.number)} names as {r.text}" for r in rules]
        return matches

    def values(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """Every variable that has a value: given ones, else the checkpoint's ``arguments``, else defaults.

        Raises:
            SpecError: a default cannot be computed.
        """
        values = dict(self.given)
        defaults: dict[str, str | int] = {}
        for name, variable in self.variables.items():
            said = [arguments[source] for source in variable.sources if type(arguments.get(source)) in (int, bool)]
            if name in values:
                continue
            if said:
                values[name] = int(said[0])
            elif variable.default is not None:
                defaults[name] = variable.default
        while ready := [name for name, default in defaults.items() if variables_in(default) <= values.keys()]:
            for name in ready:
                values[name] = evaluate(defaults.pop(name), {}, values)
        return values


def _counts(rule: Rule, where: str, variables: Mapping[str, int]) -> bool:
    try:
        return bool(evaluate(rule.when, {}, variables))
    except SpecError as error:
        raise SpecError(f"{where}, rule {rule.number}: when: {error}") from None


def _rules(value: Any, where: str) -> tuple[Rule, ...]:
    if not isinstance(value, list) or not value:
        raise SpecError(f"{where}: rules have to be a list that is not empty")
    return tuple(parse_rule(rule, f"{where}, rule {number}") for number, rule in enumerate(value, 1))


def _variables(value: Any, where: str) -> dict[str, Variable]:
    variables = {}
    for name, said in fields_of(value, where).items():
        if not isinstance(said, dict):
            variables[name] = Variable((), expression(said, f"{where}: {name}"))
            continue
        body = fields_of(said, f"{where}: {name}", {"from", "default"})
        sources = body.get("from", [])
        sources = [sources] if isinstance(sources, str) else sources
        if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
            raise SpecError(f"{where}: {name}: from has to be a name or a list of names")
        default = expression(body["default"], f"{where}: {name}") if "default" in body else None
        variables[name] = Variable(tuple(sources), default)
    return variables


def _problems(rules: Sequence[Rule], names: Sequence[str]) -> tuple[list[str], int]:
    """What is wrong between rules and names, in words, and how much of it there is."""
    hits = {name: [rule.number for rule in rules if rule.match(name) is not None] for name in names}
    unmatched = [name for name, rules_hit in hits.items() if not rules_hit]
    ambiguous = [f"{name} (rules {', '.join(map(str, hit))})" for name, hit in hits.items() if len(hit) > 1]
    used = {number for hit in hits.values() for number in hit}
    idle = [f"{rule.number} ({rule.text})" for rule in rules if rule.number not in used and not rule.optional]
    problems = []
    if unmatched:
        problems.append(f"no rule matches {_listed(unmatched)}")
    if ambiguous:
        problems.append(f"several rules match {_listed(ambiguous)}")
    if idle:
        problems.append(f"nothing matches rule {_listed(idle)}; remove it, or say that it is optional")
    return problems, len(unmatched) + len(ambiguous) + len(idle)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
