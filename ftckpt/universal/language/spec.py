"""Specifications: the sharding of parameters, for checkpoints that do not record it.

A specification is a YAML file of rules, see ``specs/README.md``. It must be complete: each name matches exactly one
rule, and each rule at least one name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftckpt.errors import SpecError
from ftckpt.model.text import listed
from ftckpt.universal.language.patterns import Pattern, Value, evaluate, variables_in

KINDS = ("unique", "replicated", "average", "fragment", "drop")
"""The kinds of rules: fields of which each rule has exactly one."""
_FIELDS = {
    "match", "rename", "when", "optional", "pipeline_replicated", "padded_vocabulary", "expert", "stack",
    *KINDS,
}  # fmt: skip


@dataclass(frozen=True)
class SubParameter:
    """A part of a dimension that is sharded on its own.

    ``width``: its size over all ranks; if None, all parts of a rank have the same size. ``unit``: the size that is
    never cut (a head). If units do not divide evenly, the first ranks hold one more; if there are fewer units than
    ranks, several ranks hold each unit.
    """

    name: str
    width: str | int | None
    unit: str | int | None


@dataclass(frozen=True)
class Cut:
    """A dimension of the stored tensor that is sharded over the ranks of ``axis``.

    ``uneven``: ranks may hold different sizes.
    """

    dim: int
    axis: str
    parts: tuple[SubParameter, ...]
    uneven: bool


@dataclass(frozen=True)
class Expert:
    """The capture that is the expert's number, and the axis over which experts are distributed; ``local``: numbers
    start at 0 on each rank."""

    number: str
    axis: str
    local: bool


@dataclass(frozen=True)
class Rule:
    """A rule, in effect unless ``when`` is 0; ``number`` is its position in the file, from 1."""

    number: int
    text: str
    patterns: tuple[Pattern, ...]
    kind: str
    cuts: tuple[Cut, ...]
    rename: str
    when: str | int
    optional: bool
    pipeline_replicated: bool
    padded: bool
    vocabulary: str | int | None
    expert: Expert | None
    stack: tuple[str, ...]

    def match(self, name: str) -> tuple[Pattern, Mapping[str, Value]] | None:
        """The first pattern that matches, and its captures; None if none does."""
        for pattern in self.patterns:
            if (captured := pattern.match(name)) is not None:
                return pattern, captured
        return None


def parse_rule(value: Any, where: str) -> Rule:
    """Parses a rule from YAML; ``where`` ends in its number. Raises SpecError that names the field."""
    body = fields_of(value, where, _FIELDS)
    kinds = [kind for kind in KINDS if kind in body]
    if len(kinds) != 1:
        raise SpecError(f"{where}: has to have one of {', '.join(KINDS)}; it has {', '.join(kinds) or 'none'}")
    kind = kinds[0]
    if kind == "drop" and not isinstance(body["drop"], str):
        raise SpecError(f"{where}: drop has to be a text: the reason")
    if kind not in ("fragment", "drop") and body[kind] is not True:
        raise SpecError(f"{where}: {kind} has to be true")
    patterns = _patterns(body, where)
    padded, vocabulary = _vocabulary(body, where)
    rename = body.get("rename", "")
    if not isinstance(rename, str):
        raise SpecError(f"{where}: rename has to be a text")
    stack = _names(body.get("stack", []), f"{where}: stack")
    expert = _expert(body["expert"], f"{where}: expert") if "expert" in body else None
    for name in (*stack, *([expert.number] if expert else [])):
        for pattern in patterns:
            if name not in pattern.captures():
                raise SpecError(f"{where}: pattern {pattern.text!r} captures no {name!r}")
    return Rule(
        number=int(where.rpartition(" ")[2]),
        text=patterns[0].text,
        patterns=patterns,
        kind=kind,
        cuts=_cuts(body["fragment"], where, expert) if kind == "fragment" else (),
        rename=rename,
        when=expression(body.get("when", 1), f"{where}: when"),
        optional=_flag(body, "optional", where),
        pipeline_replicated=_flag(body, "pipeline_replicated", where),
        padded=padded,
        vocabulary=vocabulary,
        expert=expert,
        stack=stack,
    )


def fields_of(value: Any, where: str, known: Iterable[str] | None = None) -> dict[str, Any]:
    """Checks that ``value`` is a mapping with ``known`` names (None: any), and returns it. Raises SpecError."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise SpecError(f"{where}: has to be a mapping of names")
    unknown = sorted(set(value) - set(known)) if known is not None else []
    if unknown:
        raise SpecError(f"{where}: unknown field {', '.join(unknown)}; known are {', '.join(sorted(known or ()))}")
    return value


def expression(value: Any, where: str) -> str | int:
    """Checks that ``value`` is an integer or the text of an expression, and returns it. Raises SpecError."""
    if type(value) not in (int, str):
        raise SpecError(f"{where}: {value!r} has to be an integer or an expression such as $heads * $head_dim")
    text: str | int = value
    return text


def _patterns(body: Mapping[str, Any], where: str) -> tuple[Pattern, ...]:
    globs = _names(body.get("match", []), f"{where}: match")
    if not globs:
        raise SpecError(f"{where}: has no match; add one")
    return tuple(map(Pattern.glob, globs))


def _names(value: Any, where: str) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise SpecError(f"{where}: has to be a text or a list of texts")
    return tuple(values)


def _flag(body: Mapping[str, Any], name: str, where: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise SpecError(f"{where}: {name} has to be true or false")
    return value


def _vocabulary(body: Mapping[str, Any], where: str) -> tuple[bool, str | int | None]:
    if "padded_vocabulary" not in body:
        return False, None
    value = body["padded_vocabulary"]
    body = fields_of({} if value is True else value, f"{where}: padded_vocabulary", {"size"})
    return True, expression(body["size"], f"{where}: padded_vocabulary: size") if "size" in body else None


def _expert(value: Any, where: str) -> Expert:
    body = fields_of({"number": value} if isinstance(value, str) else value, where, {"number", "axis", "numbers"})
    if not isinstance(body.get("number"), str):
        raise SpecError(f"{where}: number has to be the name of a capture")
    numbers = body.get("numbers", "local")
    if numbers not in ("local", "global"):
        raise SpecError(f"{where}: numbers has to be local or global, not {numbers!r}")
    return Expert(body["number"], _axis(body, "ep", where), numbers == "local")


def _axis(body: Mapping[str, Any], default: str, where: str) -> str:
    axis = body.get("axis", default)
    if not isinstance(axis, str):
        raise SpecError(f"{where}: axis has to be a name such as tp")
    return axis


def _cuts(value: Any, where: str, expert: Expert | None) -> tuple[Cut, ...]:
    cuts = tuple(
        _cut(each, f"{where}: fragment", "etp" if expert else "tp")
        for each in (value if isinstance(value, list) else [value])
    )
    for what in ("dim", "axis"):
        values = [getattr(cut, what) for cut in cuts]
        if not values or len(set(values)) != len(values):
            raise SpecError(f"{where}: fragment: has to have at least one {what}, and none twice")
    return cuts


def _cut(value: Any, where: str, axis: str) -> Cut:
    body = fields_of(value, where, {"dim", "axis", "parts", "uneven"})
    dim = body.get("dim")
    if type(dim) is not int or dim < 0:
        raise SpecError(f"{where}: dim has to be 0 or more, not {dim!r}")
    parts = body.get("parts", [])
    if not isinstance(parts, list):
        raise SpecError(f"{where}: parts has to be a list")
    sub_parameters = tuple(_part(part, f"{where}: part {number}") for number, part in enumerate(parts, 1))
    if len({part.width is None for part in sub_parameters}) > 1:
        raise SpecError(f"{where}: either all parts have a width or none has")
    return Cut(dim, _axis(body, axis, where), sub_parameters, _flag(body, "uneven", where))


def _part(value: Any, where: str) -> SubParameter:
    body = fields_of({"name": value} if isinstance(value, str) else value, where, {"name", "width", "unit"})
    if not isinstance(body.get("name"), str):
        raise SpecError(f"{where}: has to have a name")
    if "unit" in body and "width" not in body:
        raise SpecError(f"{where}: a unit needs a width")
    sizes = {key: expression(body[key], f"{where}: {key}") for key in ("width", "unit") if key in body}
    return SubParameter(body["name"], sizes.get("width"), sizes.get("unit"))


READY = Path(__file__).parent / "specs"
_MOST_NAMED = 8

_Match = tuple[Rule, Pattern, Mapping[str, Value]]
Matches = Mapping[str, _Match]
"""Name → the rule that it matches, the pattern that did, and its captures."""


@dataclass(frozen=True)
class Variable:
    """A number: the first of the checkpoint's arguments ``sources`` that is an integer, else ``default``."""

    sources: tuple[str, ...]
    default: str | int | None = None


@dataclass(frozen=True)
class Spec:
    """Rules for one kind of checkpoint: ``rules``, or ``variants`` of which the one that fits a checkpoint applies.

    Call ``load``, then ``match`` and ``values`` with the checkpoint's names and arguments.
    """

    origin: str
    rules: tuple[Rule, ...] = ()
    variants: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    variables: Mapping[str, Variable] = field(default_factory=dict)
    given: Mapping[str, int] = field(default_factory=dict)
    summary: list[str] = field(default_factory=list, compare=False)
    """Messages about each rule and the number of names it matched; filled by ``match``."""

    @classmethod
    def load(cls, name: str | Path, given: Mapping[str, int] | None = None) -> Spec:
        """Loads the built-in specification ``name``, or a file; ``given`` variables override all others.

        Raises:
            SpecError: it does not exist or is invalid; the text names the rule and the field.
        """
        # Imported on use: jobs without a specification do not need pyyaml.
        try:
            import yaml
        except ImportError:
            text = f"{name}: a specification needs yaml, which is not installed: pip install 'ftckpt[cli]'"
            raise SpecError(text) from None
        ready = {path.stem: path for path in sorted(READY.glob("*.yaml"))}
        path = ready.get(str(name), Path(name))
        try:
            # safe_load: a specification may come with a checkpoint, and must not create objects.
            value = yaml.safe_load(path.read_text())
        except FileNotFoundError:
            raise SpecError(f"{name}: neither a file nor one of {', '.join(ready)}") from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise SpecError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
        return cls.parse(value, str(name), given)

    @classmethod
    def parse(cls, value: Any, origin: str, given: Mapping[str, int] | None = None) -> Spec:
        """Parses the value of its YAML; ``origin`` names it in errors. Raises SpecError, see ``load``."""
        body = fields_of(value, origin, {"about", "variables", "rules", "variants"})
        if ("rules" in body) == ("variants" in body):
            raise SpecError(f"{origin}: has to have either rules or variants")
        rules = {"": body["rules"]} if "rules" in body else fields_of(body["variants"], f"{origin}: variants")
        parsed = {name: _rules(each, f"{origin}: {name}" if name else origin) for name, each in rules.items()}
        variables = _variables(body.get("variables") or {}, f"{origin}: variables")
        unknown = sorted(name for name in given or () if name not in variables and f"${name}" not in str(value))
        if unknown:
            known = ", ".join(sorted(variables)) or "none"
            raise SpecError(f"{origin}: no rule uses a variable {', '.join(unknown)}; known are {known}")
        return cls(origin, parsed.pop("", ()), parsed, variables, dict(given or {}))

    def match(self, names: Iterable[str], arguments: Mapping[str, Any]) -> Matches:
        """The rule of each name, of the first variant whose rules in effect fit all ``names``.

        Raises:
            SpecError: none fits; the text explains the one with the fewest problems.
        """
        ordered, values = sorted(set(names)), self.values(arguments)
        errors: list[tuple[int, str]] = []
        for variant, every in ({"": self.rules} if self.rules else self.variants).items():
            where = f"{self.origin}, variant {variant}" if variant else self.origin
            rules = [rule for rule in every if _counts(rule, where, values)]
            hits = {name: _matches(rules, name) for name in ordered}
            used = Counter(rule.number for found in hits.values() for rule, _, _ in found)
            problems, bad = _problems(rules, hits, used)
            if not problems:
                self.summary[:] = [f"rule {r.number}, {r.kind}: {used[r.number]} names as {r.text}" for r in rules]
                return {name: found[0] for name, found in hits.items()}
            errors.append((bad, f"{where}: {'; '.join(problems)}"))
        # The variant with the fewest problems is the one that was most likely meant.
        raise SpecError(min(errors)[1])

    def values(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """All variables with a value: the given one, else the checkpoint's argument, else the default.

        Raises:
            SpecError: a default cannot be computed.
        """
        values = dict(self.given)
        defaults: dict[str, str | int] = {}
        for name, variable in self.variables.items():
            stated = [arguments[source] for source in variable.sources if type(arguments.get(source)) in (int, bool)]
            if name in values:
                continue
            if stated:
                values[name] = int(stated[0])
            elif variable.default is not None:
                defaults[name] = variable.default
        # Repeated, as defaults may use other variables; those in a cycle stay without values.
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
    for name, stated in fields_of(value, where).items():
        if not isinstance(stated, dict):
            variables[name] = Variable((), expression(stated, f"{where}: {name}"))
            continue
        body = fields_of(stated, f"{where}: {name}", {"from", "default"})
        sources = _names(body.get("from", []), f"{where}: {name}: from")
        default = expression(body["default"], f"{where}: {name}") if "default" in body else None
        variables[name] = Variable(sources, default)
    return variables


def _matches(rules: Iterable[Rule], name: str) -> list[_Match]:
    return [(rule, *hit) for rule in rules if (hit := rule.match(name)) is not None]


def _problems(
    rules: Sequence[Rule], hits: Mapping[str, Sequence[_Match]], used: Collection[int]
) -> tuple[list[str], int]:
    """Messages about names without exactly one rule and rules without a name, and the number of both."""
    unmatched = [name for name, found in hits.items() if not found]
    ambiguous = [
        f"{name} (rules {', '.join(str(rule.number) for rule, _, _ in found)})"
        for name, found in hits.items()
        if len(found) > 1
    ]
    idle = [f"{rule.number} ({rule.text})" for rule in rules if rule.number not in used and not rule.optional]
    problems = []
    if unmatched:
        problems.append(f"no rule matches {listed(unmatched, _MOST_NAMED)}")
    if ambiguous:
        problems.append(f"several rules match {listed(ambiguous, _MOST_NAMED)}")
    if idle:
        problems.append(f"nothing matches rule {listed(idle, _MOST_NAMED)}; remove it, or make it optional")
    return problems, len(unmatched) + len(ambiguous) + len(idle)
