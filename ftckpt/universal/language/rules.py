"""The rules of a specification, as ``spec.py`` reads them from YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ftckpt.errors import SpecError
from ftckpt.universal.language.patterns import Pattern, Value

KINDS = ("unique", "replicated", "average", "fragment", "drop")
"""One of them stands in each rule."""
_FIELDS = {
    "match", "regex", "rename", "when", "optional", "pipeline_replicated", "padded_vocabulary", "expert", "stack",
    *KINDS,
}  # fmt: skip


@dataclass(frozen=True)
class SubParameter:
    """A part of a dimension that is cut over ranks on its own.

    ``width`` is its whole size; where it is absent, ``share`` is its part of what each rank has. ``unit`` is the size
    that is never cut (a head): the first ranks have one unit more where units do not divide, and where there are
    fewer units than ranks each unit is held by several ranks.
    """

    name: str
    width: str | int | None
    share: str | int
    unit: str | int | None


@dataclass(frozen=True)
class Cut:
    """One dimension of the stored tensor, cut over the ranks of ``axis``.

    ``sizes`` are those of each rank where they are said; ``uneven`` says that they may differ.
    """

    dim: int
    axis: str
    parts: tuple[SubParameter, ...]
    uneven: bool
    sizes: tuple[str | int, ...]


@dataclass(frozen=True)
class Expert:
    """Which captured number is the expert's, and over which axis experts are dealt; ``local`` ones begin at 0 on
    each rank."""

    number: str
    axis: str
    local: bool


@dataclass(frozen=True)
class Rule:
    """One rule; ``number`` counts from 1 in the order of the file. It counts only where ``when`` is not 0."""

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
        """The first pattern that matches and what it captured."""
        for pattern in self.patterns:
            if (found := pattern.match(name)) is not None:
                return pattern, found
        return None


def parse_rule(value: Any, where: str) -> Rule:
    """A rule from YAML; ``where`` ends in its number. Raises SpecError that names the field."""
    body = fields_of(value, where, _FIELDS)
    kinds = [kind for kind in KINDS if kind in body]
    if len(kinds) != 1:
        raise SpecError(f"{where}: has to have one of {', '.join(KINDS)}; it has {', '.join(kinds) or 'none'}")
    kind = kinds[0]
    if kind == "drop" and not isinstance(body["drop"], str):
        raise SpecError(f"{where}: drop has to say why, as a text")
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
    """``value``, which has to be a mapping of known names. Raises SpecError."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise SpecError(f"{where}: has to be a mapping of names")
    unknown = sorted(set(value) - set(known)) if known is not None else []
    if unknown:
        raise SpecError(f"{where}: unknown field {', '.join(unknown)}; known are {', '.join(sorted(known or ()))}")
    return value


def expression(value: Any, where: str) -> str | int:
    """``value``, which has to be an integer or the text of an expression. Raises SpecError."""
    if type(value) not in (int, str):
        raise SpecError(f"{where}: {value!r} has to be an integer or an expression such as $heads * $head_dim")
    found: str | int = value
    return found


def _patterns(body: Mapping[str, Any], where: str) -> tuple[Pattern, ...]:
    globs, regexes = (_names(body.get(field, []), f"{where}: {field}") for field in ("match", "regex"))
    if not globs and not regexes:
        raise SpecError(f"{where}: has no match and no regex")
    return (*map(Pattern.glob, globs), *map(Pattern.of_regex, regexes))


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
    said = fields_of({} if value is True else value, f"{where}: padded_vocabulary", {"dim", "size"})
    if said.get("dim", 0) != 0:
        raise SpecError(f"{where}: padded_vocabulary: dim has to be 0, the one that loaders know how to fill up")
    return True, expression(said["size"], f"{where}: padded_vocabulary: size") if "size" in said else None


def _expert(value: Any, where: str) -> Expert:
    said = fields_of({"number": value} if isinstance(value, str) else value, where, {"number", "axis", "numbers"})
    if not isinstance(said.get("number"), str):
        raise SpecError(f"{where}: number has to name what the pattern captures")
    numbers = said.get("numbers", "local")
    if numbers not in ("local", "global"):
        raise SpecError(f"{where}: numbers has to be local or global, not {numbers!r}")
    return Expert(said["number"], _axis(said, "ep", where), numbers == "local")


def _axis(said: Mapping[str, Any], default: str, where: str) -> str:
    axis = said.get("axis", default)
    if not isinstance(axis, str):
        raise SpecError(f"{where}: axis has to be a name such as tp")
    return axis


def _cuts(value: Any, where: str, expert: Expert | None) -> tuple[Cut, ...]:
    cuts = tuple(
        _cut(each, f"{where}: fragment", "etp" if expert else "tp")
        for each in (value if isinstance(value, list) else [value])
    )
    for what in ("dim", "axis"):
        said = [getattr(cut, what) for cut in cuts]
        if not said or len(set(said)) != len(said):
            raise SpecError(f"{where}: fragment: each {what} has to stand there once, and one at least")
    return cuts


def _cut(value: Any, where: str, axis: str) -> Cut:
    said = fields_of(value, where, {"dim", "axis", "parts", "uneven"})
    dim = said.get("dim")
    if type(dim) is not int or dim < 0:
        raise SpecError(f"{where}: dim has to be 0 or more, not {dim!r}")
    uneven = said.get("uneven", False)
    if not isinstance(uneven, (bool, list)):
        raise SpecError(f"{where}: uneven has to be true, or the list of the ranks' sizes")
    sizes = tuple(expression(size, f"{where}: uneven") for size in uneven) if isinstance(uneven, list) else ()
    parts = said.get("parts", [])
    if not isinstance(parts, list):
        raise SpecError(f"{where}: parts has to be a list")
    found = tuple(_part(part, f"{where}: part {number}") for number, part in enumerate(parts, 1))
    if sizes and found:
        raise SpecError(f"{where}: sizes of ranks and parts exclude each other; give parts units")
    if len({part.width is None for part in found}) > 1:
        raise SpecError(f"{where}: either all parts have a width or all have a share")
    return Cut(dim, _axis(said, axis, where), found, bool(uneven), sizes)


def _part(value: Any, where: str) -> SubParameter:
    said = fields_of({"name": value} if isinstance(value, str) else value, where, {"name", "width", "share", "unit"})
    if not isinstance(said.get("name"), str):
        raise SpecError(f"{where}: has to have a name")
    if "width" in said and "share" in said:
        raise SpecError(f"{where}: has width and share; give one of them")
    if "unit" in said and "width" not in said:
        raise SpecError(f"{where}: a unit needs a width")
    found = {key: expression(said[key], f"{where}: {key}") for key in ("width", "share", "unit") if key in said}
    return SubParameter(said["name"], found.get("width"), found.get("share", 1), found.get("unit"))
