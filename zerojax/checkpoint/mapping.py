"""Map tensors in files to parameters of other names and shapes. Import applies a mapping; export applies its inverse.

    {
        "model.embed_tokens.weight": "embed/embedding",
        "model.layers.{i}.mlp.up_proj.weight": ("layers/up/kernel", "out in -> in out"),
        "model.layers.{i}.self_attn.q_proj.weight": ("layers/query/kernel", "(h d) e -> e h d"),
        "model.layers.{i}.self_attn.rotary_emb.inv_freq": None,
    }

A key is a tensor's name in a file, with placeholders for numbers. Its value is a target, a list of targets, or None to
leave the tensors out. A target is a leaf's path, or a pair of a path and a pattern. A path is the leaf's keys joined by
"/"; the `value` at the end of an NNX variable's path may be left out.

placeholder  `{i}` matches any number. If the path has `{i}`, too, there is one leaf per number. Otherwise the tensors
             are stacked into one leaf: the number is the index in the leaf's leading dim.
pattern      names the tensor's dims before the arrow, and the leaf's dims after it. `(h d)` is one dim of the tensor
             that is split into two dims of the leaf. `()` is a dim of size 1 that the leaf does not have. All sizes
             come from the leaf.
list         names leaves that are made from the same tensor. The leaves are tied: each is a copy of the tensor. But
             if their patterns mark a dim, as in `(h+ d) e -> e h d`, each leaf is the next slice along that dim.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

PLACEHOLDER = re.compile(r"\{(\w+)\}")
MOST_LINES = 40

Target = str | tuple[str, str]
Names = Mapping[str, Target | Sequence[Target] | None]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The relation between the dims of a tensor in a file and the dims of a leaf."""

    left: tuple[tuple[str, ...], ...]  # for each dim of the tensor, the names of the leaf's dims that it contains
    right: tuple[str, ...]  # the names of the leaf's dims
    divided: str | None = None  # the name of the dim along which the tensor is divided into several leaves


@dataclasses.dataclass(frozen=True)
class Section:
    """The part of a file's tensor that holds one leaf, or one index of a stacked leaf."""

    leaf: int  # position of the leaf in the list of leaves
    index: tuple[int, ...]  # index in the leaf's stacked dims, which are its leading dims
    shape: tuple[int, ...]  # shape of the leaf without the stacked dims
    pattern: Pattern
    start: int = 0  # first index along the pattern's divided dim
    whole: int = 0  # size of the divided dim in the tensor; 0 if the tensor is not divided

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.pattern.right, self.shape, strict=True))

    @property
    def tensor_sizes(self) -> dict[str, int]:
        divided = self.pattern.divided
        return self.sizes if divided is None else self.sizes | {divided: self.whole}

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        sizes = self.tensor_sizes
        return tuple(math.prod(sizes[name] for name in dim) for dim in self.pattern.left)

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """Return the section of `tensor` as a view in the leaf's dims. Import reads this view, export writes to it."""
        sizes, names = self.tensor_sizes, [name for dim in self.pattern.left for name in dim]
        x = tensor.reshape([sizes[name] for name in names])
        x = x.transpose([names.index(name) for name in self.pattern.right])
        starts = [self.start if name == self.pattern.divided else 0 for name in self.pattern.right]
        return x[(*(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True)), ...)]


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A mapping applied to the leaves of a model."""

    tensors: dict[str, list[Section]]  # the sections of each tensor that is read or written, by the tensor's name
    left_out: list[re.Pattern]  # match the names of tensors that have an entry but are not read
    problems: list[str]  # one line per mismatch


def resolve(
    mapping: Names | None,
    leaves: Sequence[tuple[Sequence[str], tuple[int, ...]]],
    *,
    may_lack: Callable[[str], bool] = lambda path: False,
) -> Resolved:
    """Apply a mapping to leaves, each given as its keys and its shape.

    Every leaf must have one entry (at most one if `may_lack(path)`), and every entry must fit its leaves.
    `Resolved.problems` lists the mismatches.
    Without a mapping, every leaf equals the tensor whose name consists of the leaf's keys joined by dots.
    """
    if mapping is None:
        names = [".".join(keys) for keys, _ in leaves]
        if doubled := {name for name, count in collections.Counter(names).items() if count > 1}:
            raise ValueError(
                f"Two parameters would have the name {min(doubled)!r}: a key has a dot in it. Rename one, or give "
                f"mapping= with another name for it."
            )
        sections = [[Section(k, (), shape, same_dims(len(shape)))] for k, (_, shape) in enumerate(leaves)]
        return Resolved(dict(zip(names, sections, strict=True)), [], [])
    if not isinstance(mapping, Mapping):
        raise TypeError(f"mapping= is {mapping!r}, a {type(mapping).__name__}. Give a dict of names in files.")
    resolved, claims = Resolved({}, [], []), {}
    leaves = [("/".join(keys), shape) for keys, shape in leaves]
    for template, value in mapping.items():
        if value is None:
            resolved.left_out.append(matcher(template))
            continue
        targets: Any = value if isinstance(value, list) else [value]
        try:
            add_entry(resolved, claims, template, targets, leaves)
        except ValueError as error:
            resolved.problems.append(f"{template!r}: {error}")
            resolved.left_out.append(matcher(template))  # so that its tensors are not reported a second time
    unclaimed = (path for k, (path, _) in enumerate(leaves) if k not in claims and not may_lack(path))
    resolved.problems.extend(f"{path!r} is a parameter, and no entry of the mapping names it" for path in unclaimed)
    return resolved


def add_entry(resolved: Resolved, claims: dict[int, str], template: str, targets: list[Target], leaves: Any) -> None:
    """Add the tensors of one entry of a mapping to `resolved`. Raise a `ValueError` if the entry does not fit."""
    if not targets:
        raise ValueError("an empty list names no parameter; None leaves its tensors out")
    found: dict[str, list[Section]] = {}
    for target in targets:
        for name, section in sections_of(template, target, leaves, claims):
            found.setdefault(name, []).append(section)
    for name, sections in found.items():
        if name in resolved.tensors:
            raise ValueError(f"{name!r} has another entry")
        resolved.tensors[name] = fitted_sections(name, sections, len(targets))


def sections_of(template: str, target: Target, leaves: Any, claims: dict[int, str]) -> Iterator[tuple[str, Section]]:
    """Yield the name and the section of every tensor of a target. Raise a `ValueError` if the target does not fit."""
    match target:
        case str():
            path, text = target, None
        case (str(path), str(text)):
            pass
        case _:
            raise ValueError(f"{target!r} is neither a path nor a path and a pattern")
    placeholders = list(dict.fromkeys(PLACEHOLDER.findall(template)))
    if foreign := set(PLACEHOLDER.findall(path)) - set(placeholders):
        raise ValueError(f"{path!r} has the placeholder {min(foreign)!r}, which the name does not have")
    stacked = [one for one in placeholders if f"{{{one}}}" not in path]
    regex, matches = matcher(path), []
    for k, (given, shape) in enumerate(leaves):
        # The keys of an NNX variable end with "value", which a mapping may leave out.
        if match := regex.fullmatch(given) or regex.fullmatch(given.removesuffix("/value")):
            matches.append((k, match, tuple(shape)))
    if not matches:
        raise ValueError(f"there is no parameter {path!r}")
    for k, _, _ in matches:
        if k in claims:
            raise ValueError(f"{leaves[k][0]!r} has an entry already, {claims[k]!r}")
        claims[k] = template
    written = None if text is None else parse_pattern(text)
    for k, match, shape in matches:
        pattern = written or same_dims(len(shape) - len(stacked))
        rank = len(stacked) + len(pattern.right)
        if rank != len(shape):
            what = "the name" if text is None else repr(text)
            what += f", stacked over {', '.join(stacked)}," if stacked else ""
            raise ValueError(f"{leaves[k][0]!r} has the shape {list(shape)}, and {what} gives {rank} dims")
        numbers = {one: int(number) for one, number in match.groupdict().items()}
        for index in np.ndindex(shape[: len(stacked)]):
            every = numbers | dict(zip(stacked, index, strict=True))
            name = PLACEHOLDER.sub(lambda m, every=every: str(every[m[1]]), template)
            yield name, Section(k, index, shape[len(stacked) :], pattern)


def fitted_sections(name: str, sections: list[Section], count: int) -> list[Section]:
    """Return the sections of one tensor, each with its `start`. Raise a `ValueError` if they do not fit together."""
    if len(sections) != count:
        raise ValueError(f"{name!r} is for {count} parameters, and there are {len(sections)}")
    ways = {(one.pattern.left, one.pattern.divided) for one in sections}
    if len(ways) > 1 and any(divided for _, divided in ways):
        raise ValueError("if one pattern has a +, all patterns must have the same left side")
    divided = sections[0].pattern.divided
    if divided is None:
        if len(shapes := {one.tensor_shape for one in sections}) > 1:
            raise ValueError(f"its parameters are tied, and make tensors of the shapes {sorted(map(list, shapes))}")
        return sections
    if len({tuple(sorted((one.sizes | {divided: 0}).items())) for one in sections}) > 1:
        raise ValueError(f"its parameters follow one another along {divided!r}, and differ in other sizes")
    starts = np.cumsum([0, *(one.sizes[divided] for one in sections)]).tolist()
    return [
        dataclasses.replace(one, start=start, whole=starts[-1]) for one, start in zip(sections, starts, strict=False)
    ]


def parse_pattern(text: str) -> Pattern:
    before, arrow, after = text.partition("->")
    dims = [(inner or one).split() for inner, one in re.findall(r"\(([^()]*)\)|([^\s()]+)", before)]
    left = tuple(tuple(name.removesuffix("+") for name in dim) for dim in dims)
    divided = [name.removesuffix("+") for dim in dims for name in dim if name.endswith("+")]
    names, right = [name for dim in left for name in dim], tuple(after.split())
    rest = re.sub(r"\([^()]*\)", "", before)
    proper = all(name.isidentifier() for name in names) and not set("()") & set(rest)
    if not arrow or not proper or len(divided) > 1 or sorted(names) != sorted(set(right)) or len(names) != len(right):
        raise ValueError(
            f"{text!r} is no pattern. Name the tensor's dims and then the leaf's, as in 'out in -> in out' or "
            f"'(h d) e -> e h d': each name once on either side, parentheses on the left, at most one name with a +"
        )
    return Pattern(left, right, *divided)


def same_dims(rank: int) -> Pattern:
    """Return the pattern of a leaf with `rank` dims that equals its tensor."""
    names = tuple(f"d{dim}" for dim in range(rank))
    return Pattern(tuple((name,) for name in names), names)


def matcher(template: str) -> re.Pattern:
    """Return a regular expression that matches the names of a template, with one group per placeholder."""
    literal, seen = PLACEHOLDER.split(template), set()
    for i in range(1, len(literal), 2):
        name = literal[i]
        literal[i] = f"(?P={name})" if name in seen else rf"(?P<{name}>\d+)"
        seen.add(name)
    literal[::2] = map(re.escape, literal[::2])
    return re.compile("".join(literal))


def listed(problems: Iterable[str]) -> str:
    """List problems, one per line. Problems that differ only in numbers share a line."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(re.sub(r"\d+", "0", problem), []).append(problem)
    lines = [first + (f" (and {len(more)} more like it)" if more else "") for first, *more in alike.values()]
    rest = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return "".join(f"\n  {line}" for line in [*lines[:MOST_LINES], *rest])
