r"""What critics could still win on layers: how much they tell of the noise that hindsight leaves, beside the exact Q.

Sigmoid belief networks of ``sbn.py`` after 1,000 steps. Per layer but the last, whose costs are all immediate:

- *none*: variance of the costs ``B + L`` that read sites downstream, centred by three other particles;
- *scaled*: what two scales leave, of the immediate costs and of crossed costs; this is what ``Hindsight`` does;
- *slopes*: the same with the slopes of the other particles, straight through the layers above, times the own value: a
  critic inside the step;
- critics that are linear in the value, fitted to half of the rows and tested on the other half. Their coefficients are
  fixed, or follow from the component's own probability, or from principal components of the layer's own law, which
  stands for the row;
- *quadratic*: critics shaped like a layer's own costs, linear plus quadratic of low rank in the value. A small net
  gives their coefficients from the law; their expectations are known in closed form. They are trained by Adam on three
  quarters of the first half, stopped where the last quarter is told best, and tested on the other half;
- *quadratic, slopes*: the same critics, fitted to the costs and to their slopes, straight through the layers above;
- *exact*: the variance that the exact Q of the value would leave, from two continuations of each value.

    python benchmarks/layer_critics.py [--full | --smoke] [--seeds N] [--output DIRECTORY]
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pyro
import torch
import vae
from common import Row, arguments, progress, table, write_csv, write_markdown
from gradients import RATE
from race import Runner, plain_leave_one_out
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

PARTICLES, COMPONENTS = 4, (5, 10)
# Steps of training ahead, batches of 100 rows that are fitted and tested, epochs of the quadratic critics.
QUICK, FULL, SMOKE = (1000, 120, 30), (1000, 600, 30), (2, 2, 1)
RANK, HIDDEN, RATES, ROWS = 16, 32, (1e-3, 3e-3, 1e-2), 200


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

    def slope_now(self, layer: int) -> Tensor:
        """Slope of the immediate costs in the value."""
        with torch.enable_grad():
            leaf = self.values[layer].clone().requires_grad_()
            cost = self.model_cost(layer, leaf, self.below(layer)) - entropy_cost(self.logits[layer], leaf)
            (found,) = torch.autograd.grad(cost.sum(), leaf)
        return found

    def slope_later(self, layer: int) -> Tensor:
        """Slope of the later costs in the value, straight through."""
        with torch.enable_grad():
            leaf = self.values[layer].clone().requires_grad_()
            read, total = leaf, torch.zeros(())
            for i in range(layer + 1, self.depth):
                logits = self.net.up[i](2.0 * read - 1.0)
                value = logits.sigmoid() + (self.values[i] - logits.sigmoid()).detach()
                total = total + (self.model_cost(i, value, read) - entropy_cost(logits, value)).sum()
                read = value
            (found,) = torch.autograd.grad(total, leaf)
        return found

    def slopes(self, layer: int) -> Tensor:
        """The others' mean slope of the later costs times the own value's distance from theirs."""
        return (others(self.slope_later(layer)) * (self.values[layer] - others(self.values[layer]))).sum(-1)


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


class Quadratic(nn.Module):
    r"""Centred critic ``a(law) · v + Σ_r s_r(law) [(u_r · v)² - Σ_d u_rd² q_d (1 - q_d)]`` of ``v = value - q``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(vae.LATENTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, vae.LATENTS + RANK))
        self.vectors = nn.Parameter(0.1 * torch.randn(RANK, vae.LATENTS))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, value: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
        """The centred critic ``(rows,)`` and its slope in the value ``(rows, D)``."""
        linear, scales = self.net(law).split((vae.LATENTS, RANK), -1)
        along = value @ self.vectors.T
        # The law is 2 q - 1.
        spread = 0.25 * (1.0 - law.square()) @ self.vectors.square().T
        critic = (linear * value).sum(-1) + (scales * (along.square() - spread)).sum(-1)
        return critic, linear + 2.0 * (scales * along) @ self.vectors


def left_by_quadratic(data: Mapping[str, Tensor], rest: Tensor, slope: Tensor | None, epochs: int) -> float:
    """Mean square of the second half that the critic leaves, with the rate and the epoch best on held-out rows."""
    half = len(rest) // 2
    fitted, held, tested = slice(0, 3 * half // 4), slice(3 * half // 4, half), slice(half, None)

    def of(critic: Quadratic, rows: slice) -> float:
        pairs = zip(data["value"][rows].split(2000), data["law"][rows].split(2000), strict=True)
        told = torch.cat([critic(value, law)[0] for value, law in pairs])
        return float((rest[rows] - told).square().mean())

    # Slopes weigh as much as costs: the sum over the components of a flip's squared error.
    generator, best, found = torch.Generator().manual_seed(0), math.inf, math.nan
    for rate in RATES:
        torch.manual_seed(0)
        critic = Quadratic()
        optimizer = torch.optim.Adam(critic.parameters(), rate)
        for _ in range(epochs):
            for rows in torch.randperm(fitted.stop, generator=generator).split(ROWS):
                with torch.enable_grad():
                    told, bent = critic(data["value"][rows], data["law"][rows])
                    loss = (rest[rows] - told).square().mean()
                    if slope is not None:
                        open_ = 0.25 * (1.0 - data["law"][rows].square())
                        loss = loss + (open_ * (slope[rows] - bent).square()).sum(-1).mean()
                    optimizer.zero_grad()
                    loss.backward()
                optimizer.step()
            if (now := of(critic, held)) < best:
                best, found = now, of(critic, tested)
    return found


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
            row |= {"slope_now": drawn.slope_now(i).flatten(0, 1), "slope_later": drawn.slope_later(i).flatten(0, 1)}
            again = []
            for _ in range(2):
                drawn.grow(i + 1, value)
                again.append(drawn.later(i))
            # Half the squared difference of two continuations is the variance given the value.
            unknown = 0.5 * (again[0] - again[1]).square().mean() * PARTICLES / (PARTICLES - 1)
            found.append({**row, "unknown": unknown.reshape(1)})
        yield found


def measure(depth: int, digits: vae.Digits, steps: int, batches: int, epochs: int, seed: int) -> list[Row]:
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
        return [
            {"task": task.name, "layer": i + 1, "seed": seed, **figures(part, epochs)} for i, part in enumerate(parts)
        ]


def figures(parts: tuple[dict[str, Tensor], ...], epochs: int) -> dict[str, float]:
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
    slope = data["slope_later"] - weights[0] * data["slope_now"]
    found["quadratic"] = left_by_quadratic(data, rest, None, epochs)
    found["quadratic, slopes"] = left_by_quadratic(data, rest, slope, epochs)
    return found | {"exact": float(data["unknown"].mean())}


def main() -> None:
    """Measures, prints, writes ``layer_critics.csv`` and ``layer_critics.md``."""
    options = arguments(__doc__)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="pyro")
    steps, batches, epochs = FULL if options.full else SMOKE if options.smoke else QUICK
    digits = vae.load_digits({"curve": 1, "valid": 1, "test": 1})
    if digits is None:
        print("layer_critics.py: skipped, PYRO_BPQ_DATA names no folder with mnist.npz")
        return
    depths = (2,) if options.smoke else (2, 4)
    seeds = range(options.seeds or 1)
    rows = [row for depth in depths for seed in seeds for row in measure(depth, digits, steps, batches, epochs, seed)]
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
