"""What programs read that changes between two steps: numbers, flags, sizes and tensors, and where they are."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

__all__ = ["Knobs"]

# By where it is: how it is made, how the program reads it, and how it is changed.
Place = tuple[str, str, str]
PLACES: dict[str, Place] = {
    "argument": ("", "{k}", ""),
    "attribute": ("box.{k} = {old}", "box.{k}", "box.{k} = {now}"),
    "attribute of a class": ("Box.{k} = {old}", "box.{k}", "Box.{k} = {now}"),
    "attribute of a module": ("{k} = Net(1, 0); {k}.kept = {old}", "{k}.kept", "{k}.kept = {now}"),
    "slot": ("{k} = Slot({old})", "{k}.kept", "{k}.kept = {now}"),
    "method": ("{k} = Slot({old})", "{k}.read()", "{k}.kept = {now}"),
    "closure": ("{k}, put_{k} = closed({old})", "{k}()", "put_{k}({now})"),
    "default": ("{k} = lambda x={old}: x", "{k}()", "{k}.__defaults__ = ({now},)"),
    "partial": ("{k} = partial(Slot, {old})", "{k}().kept", 'globals()["{k}"] = partial(Slot, {now})'),
    "global": ("{k} = {old}", "{k}", 'globals()["{k}"] = {now}'),
    "entry of a dict": ('table["{k}"] = {old}', 'table["{k}"]', 'table["{k}"] = {now}'),
    "entry of a list": ("{k} = [[1.5], {old}]", "{k}[1]", "{k}[1] = {now}"),
    "array": ("{k} = np.array([0, {old}])", "{k}[1].item()", "{k}[1] = {now}"),
    "view of an array": ("{k} = np.array([0, {old}]); v_{k} = {k}[::-1]", "{k}[1].item()", "v_{k}[0] = {now}"),
}
TENSORS: dict[str, Place] = {
    "tensor as argument": ("", "{k}", ""),
    "written": ("{k} = torch.tensor({old})", "{k}", "{k}.copy_(torch.tensor({now}))"),
    "written through a view": ("{k} = torch.tensor({old}); v_{k} = {k}.view(-1)", "{k}", "v_{k}.copy_({flat})"),
    "view of what is written": ("v_{k} = torch.tensor({old}); {k} = v_{k}[None]", "{k}[0]", "v_{k}.copy_({tensor})"),
    "replaced": ("{k} = torch.tensor({old})", "{k}", 'globals()["{k}"] = torch.tensor({now})'),
    "attribute replaced": ("box.{k} = torch.tensor({old})", "box.{k}", "box.{k} = torch.tensor({now})"),
    "data": ("{k} = torch.tensor({old})", "{k}", "{k}.data = torch.tensor({now})"),
    "buffer": ("{k} = Buffer(torch.tensor({old}))", "{k}()", "{k}.kept = torch.tensor({now})"),
    "buffer written": ("{k} = Buffer(torch.tensor({old}))", "{k}()", "{k}.kept.copy_(torch.tensor({now}))"),
    "array behind a tensor": ("{k} = np.array({old})", "torch.as_tensor({k})", "{k}[...] = {now}"),
    "parameter": ("", "pyro.param({init})", "pyro.param({init}).data.copy_({tensor})"),
}
SHAPES: dict[str, Place] = {
    "length": ("{k} = torch.zeros({old}, 2)", "len({k})", 'globals()["{k}"] = torch.zeros({now}, 2)'),
    "shape": ("{k} = torch.zeros(2, {old})", "{k}.shape[1]", "{k}.data = torch.zeros(2, {now})"),
    "length of a list": ("{k} = [0] * {old}", "len({k})", "{k}[:] = [0] * {now}"),
}


@dataclass
class Knobs:
    """The knobs of a program, at most three."""

    rng: random.Random
    header: list[str] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    arguments: dict[str, tuple[str, str]] = field(default_factory=dict)
    features: set[str] = field(default_factory=set)
    count: int = 0

    def is_turn(self, chance: float) -> bool:
        """Whether the next thing may be a knob."""
        return self.count < 3 and self.rng.random() < chance

    def number(self, low: float, high: float) -> str:
        """A number."""
        old, new = (f"{self.rng.uniform(low, high):.2f}" for _ in range(2))
        if self.rng.random() < 0.3:
            tensor = self.tensor(old, new)
            return self.rng.choice([tensor, f"float({tensor})", f"{tensor}.item()"])
        return self._put(self._place(PLACES), old, new)

    def flag(self) -> str:
        """Something that holds before or after the change, not both."""
        way = self.rng.randrange(4)
        if way == 0:
            return f"{self.sign()} > 0"
        if way == 1:
            return f'{self._put(self._place(PLACES, "array"), *self._pair(repr("on"), repr("off")))} == "on"'
        if way == 2:
            return f"{self._put(self._place(PLACES, 'array'), *self._pair('None', '0.5'))} is None"
        return self._put(self._place(PLACES), *self._pair("True", "False"))

    def sign(self) -> str:
        """A number that is negative before or after the change, not both."""
        pair = self._pair("1.5", "-0.7")
        return self.tensor(*pair) if self.rng.random() < 0.5 else self._put(self._place(PLACES), *pair)

    def size(self, low: int, high: int) -> str:
        """A whole number, ``low`` at least and less than ``high``."""
        old, new = (str(size) for size in self.rng.sample(range(low, high), 2))
        way = self.rng.random()
        if way < 0.3 and low > 0:
            return self._put(self._place(SHAPES), old, new)
        if way < 0.5:
            return f"int({self.tensor(f'{old}.0', f'{new}.0')})"
        return self._put(self._place(PLACES), old, new)

    def tensor(self, old: str, new: str) -> str:
        """A tensor of some numbers."""
        return self._put(self._place(TENSORS), old, new)

    def _pair(self, one: str, two: str) -> tuple[str, str]:
        return (one, two) if self.rng.random() < 0.5 else (two, one)

    def _place(self, places: dict[str, Place], without: str = " ") -> tuple[str, Place]:
        name = self.rng.choice([name for name in places if without not in name])
        return name, places[name]

    def _put(self, place: tuple[str, Place], old: str, new: str) -> str:
        self.count += 1
        name, (made, read, turned) = place
        k, now = f"k{self.count}", f"({old}, {new})[now]"
        self.features.add(f"change: {name}")
        texts = {"k": k, "old": old, "now": now, "tensor": f"torch.tensor({now})"}
        texts |= {"flat": f"{texts['tensor']}.view(-1)", "init": f'"{k}", torch.tensor({old})'}
        self.header.append(made.format(**texts))
        if "argument" in name:
            form = "torch.tensor({})" if "tensor" in name else "{}"
            self.arguments[k] = form.format(old), form.format(now)
        else:
            self.turns.append(turned.format(**texts))
        return read.format(**texts)

    def text(self) -> list[str]:
        """The function that turns them, and gives the arguments."""
        values = "".join(f"{now}, " for _, now in self.arguments.values())
        return ["@torch.no_grad()", "def turn(now):", *(f"    {line}" for line in self.turns), f"    return ({values})"]

    def signed(self, line: str) -> str:
        """A line; that of a function takes the arguments."""
        return line.replace("():", f"({', '.join(f'{k}={old}' for k, (old, _) in self.arguments.items())}):")
