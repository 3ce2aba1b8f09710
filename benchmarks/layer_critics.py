r"""What critics could still win on layers: how much they tell of the noise that hindsight leaves, beside the exact Q.

Sigmoid belief networks of ``sbn.py`` after 1,000 steps. Per layer but the last, whose costs are all immediate:

- *none*: variance of the costs ``B + L`` that read sites downstream, centred by three other particles;
- *scaled*: what two scales leave, of the immediate costs and of crossed costs; this is what ``Hindsight`` does;
- *slopes*: the same with the slopes of the other particles, straight through the layers above, times the own value: a
  critic inside the step;
- critics that are linear in the value, fitted to half of the rows and tested on the other half. Their coefficients are
  fixed, or follow from the component's own probability, or from principal components of the layer's own law, which
  stands for the row;
- *exact*: the variance that the exact Q of the value would leave, from two continuations of each value.

    python benchmarks/layer_critics.py [--full | --smoke] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import pyro
import torch
import vae
from common import Row, arguments, progress, table, write_csv, write_markdown
from gradients import RATE
from race import Runner, plain_leave_one_out
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

PARTICLES, COMPONENTS = 4, (5, 10)
# Steps of training ahead, batches of 100 rows that are fitted and tested.
QUICK, FULL, SMOKE = (1000, 120), (1000, 600), (2, 2)


def entropy_cost(logits: Tensor, bits: Tensor) -> Tensor:
    """Minus the log-probability of rows of bits, in nats."""
    return cross_entropy(logits, bits, reduction="none").sum(-1)


class Layers:
    """Values and costs of some particles on a batch.

    Args:
        net: The belief network.
        images: Binary images ``(rows, 784)``.
    """

    def __init__(self, net: vae.BeliefNet, images: Tensor) -> None:
        self.net, self.images, self.depth = net, images, len(net.up)
        self.values: list[Tensor] = []
        self.logits: list[Tensor] = []
        self.grow(0, None)

    def grow(self, layer: int, below: Tensor | None) -> None:
        """Draws the layers from one on, given the values below."""
        rows = (self.images - self.net.mean).expand(PARTICLES, *self.images.shape)
        read = rows if below is None else 2.0 * below - 1.0
        self.values, self.logits = self.values[:layer], self.logits[:layer]
        for net in self.net.up[layer:]:
            self.logits.append(net(read))
            self.values.append(torch.bernoulli(self.logits[-1].sigmoid()))
            read = 2.0 * self.values[-1] - 1.0

    def below(self, layer: int) -> Tensor:
        """The values that a layer's model explains."""
        return self.values[layer - 1] if layer else self.images.expand(PARTICLES, *self.images.shape)

    def model_cost(self, layer: int, bits: Tensor, below: Tensor) -> Tensor:
        """Minus the model's log-probability of the bits below."""
        return entropy_cost(self.net.down[layer](2.0 * bits - 1.0), below)

    def immediate(self, layer: int) -> Tensor:
        """Costs ``(particles, rows)`` that read a layer and none above."""
        cost = self.model_cost(layer, self.values[layer], self.below(layer))
        return cost - entropy_cost(self.logits[layer], self.values[layer])

    def later(self, layer: int) -> Tensor:
        """Costs of the layers above."""
        return sum((self.immediate(i) for i in range(layer + 1, self.depth)), torch.zeros(()))

    def crossed(self, layer: int) -> Tensor:
        """What the others' immediate costs change by beside the own past."""
        if layer == 0:
            return torch.zeros(PARTICLES, len(self.images))
        total, own = torch.zeros(()), self.immediate(layer)
        for shift in range(1, PARTICLES):
            value = self.values[layer].roll(shift, 0)
            beside = self.model_cost(layer, value, self.below(layer)) - entropy_cost(self.logits[layer], value)
            total = total + beside - own.roll(shift, 0)
        return total / (PARTICLES - 1)

    def slopes(self, layer: int) -> Tensor:
        """The others' mean slope of the later costs, straight through, times the own value's distance from theirs."""
        with torch.enable_grad():
            leaf = self.values[layer].clone().requires_grad_()
            read, total = leaf, torch.zeros(())
            for i in range(layer + 1, self.depth):
                logits = self.net.up[i](2.0 * read - 1.0)
                value = logits.sigmoid() + (self.values[i] - logits.sigmoid()).detach()
                total = total + (self.model_cost(i, value, read) - entropy_cost(logits, value)).sum()
                read = value
            (found,) = torch.autograd.grad(total, leaf)
        return (others(found) * (self.values[layer] - others(self.values[layer]))).sum(-1)


def others(tensor: Tensor) -> Tensor:
    """Mean over the other particles."""
    return (tensor.sum(0, keepdim=True) - tensor) / (len(tensor) - 1)


def left(target: Tensor, columns: Callable[[slice], Tensor], ridge: float = 1e-3) -> float:
    """Mean square of the second half of a target that a regression on the first half leaves."""
    half, size = len(target) // 2, 2000
    gram, product = torch.zeros(()), torch.zeros(())
    for start in range(0, half, size):
        rows = slice(start, min(half, start + size))
        part = columns(rows)
        gram, product = gram + part.T @ part, product + part.T @ target[rows]
    weights = torch.linalg.solve(gram + ridge * gram.diagonal().mean() * torch.eye(len(gram)), product)
    rest = [slice(start, start + size) for start in range(half, len(target), size)]
    return float(torch.cat([target[rows] - columns(rows) @ weights for rows in rest]).square().mean())


def rows_of(net: vae.BeliefNet, batches: Iterator[Tensor]) -> Iterator[list[dict[str, Tensor]]]:
    """What is drawn on each batch, by layer."""
    for images in batches:
        drawn = Layers(net, images)
        found = []
        for i in range(drawn.depth - 1):
            value, chance = drawn.values[i], drawn.logits[i].sigmoid()
            later, immediate = drawn.later(i), drawn.immediate(i)
            row = {"later": later - others(later), "immediate": immediate - others(immediate)}
            row |= {"crossed": drawn.crossed(i), "slopes": drawn.slopes(i)}
            row = {name: tensor.flatten() for name, tensor in row.items()}
            row |= {"value": (value - chance).flatten(0, 1), "law": (2.0 * chance - 1.0).flatten(0, 1)}
            again = []
            for _ in range(2):
                drawn.grow(i + 1, value)
                again.append(drawn.later(i))
            # Half the squared difference of two continuations is the variance given the value.
            unknown = 0.5 * (again[0] - again[1]).square().mean() * PARTICLES / (PARTICLES - 1)
            found.append({**row, "unknown": unknown.reshape(1)})
        yield found


def measure(depth: int, digits: vae.Digits, steps: int, batches: int, seed: int) -> list[Row]:
    """A row per layer."""
    task = replace(digits, name=f"{depth} layers", depth=depth)
    trainer = Runner(task, plain_leave_one_out(8), RATE, seed)
    with pyro.get_param_store().scope(trainer.state) as trainer.state:
        while trainer.steps < steps:
            trainer.step()
    generator, net = torch.Generator().manual_seed(seed + 1000), trainer.programs
    with torch.no_grad():
        images = (task.batch(generator)[0] for _ in progress(range(batches), task.name))
        parts = list(zip(*rows_of(net, images), strict=True))
        return [{"task": task.name, "layer": i + 1, "seed": seed, **figures(part)} for i, part in enumerate(parts)]


def figures(parts: tuple[dict[str, Tensor], ...]) -> dict[str, float]:
    """What each critic leaves of a layer's noise, in squared nats."""
    data = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    known = torch.stack([data["immediate"], data["crossed"]], -1)
    target = data["later"]
    weights = torch.linalg.lstsq(known, target.unsqueeze(-1)).solution[:, 0]
    rest, value, law = target - known @ weights, data["value"], data["law"]
    slopes = torch.cat([known, data["slopes"].unsqueeze(-1)], -1)
    centred = law - law.mean(0)
    row = centred @ torch.pca_lowrank(centred, q=max(COMPONENTS))[2]
    row = row / row.std(0)
    found = {
        "none": float(target.square().mean()),
        "scaled": left(target, lambda at: known[at]),
        "slopes": left(target, lambda at: slopes[at]),
        "fixed": left(rest, lambda at: value[at]),
        "own probability": left(rest, lambda at: torch.cat([value[at], value[at] * law[at]], -1)),
    }
    for number in COMPONENTS:

        def products(at: slice, number: int = number) -> Tensor:
            crossed = value[at].unsqueeze(-1) * row[at, :number].unsqueeze(-2)
            return torch.cat([value[at], crossed.flatten(1)], -1)

        found[f"{number} components"] = left(rest, products)
    return found | {"exact": float(data["unknown"].mean())}


def main() -> None:
    """Measures, prints, writes ``layer_critics.csv`` and ``layer_critics.md``."""
    options = arguments(__doc__)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="pyro")
    steps, batches = FULL if options.full else SMOKE if options.smoke else QUICK
    digits = vae.load_digits({"curve": 1, "valid": 1, "test": 1})
    if digits is None:
        print("layer_critics.py: skipped, PYRO_BPQ_DATA names no folder with mnist.npz")
        return
    depths = (2,) if options.smoke else (2, 4)
    seeds = range(options.seeds or 1)
    rows = [row for depth in depths for seed in seeds for row in measure(depth, digits, steps, batches, seed)]
    text = (
        "Variance, in squared nats, of the costs that multiply a layer's score in hindsight, after "
        f"{steps} steps of training; {PARTICLES} particles. *none*: centred by the other particles. *scaled*: with "
        "immediate and crossed costs at their best scales, as `Hindsight` does it. The critics to the right are fitted "
        f"to half of {batches * 100 * PARTICLES} values and tested on the others. *exact*: what the exact Q leaves."
    )
    page = table(rows)
    print(page)
    write_csv(options.output / "layer_critics.csv", rows)
    write_markdown(options.output / "layer_critics.md", "Critics of layers", [text, page])


if __name__ == "__main__":
    main()
