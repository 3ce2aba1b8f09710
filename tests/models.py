"""Small model and guide pairs whose joint states can be enumerated, for all tests of estimators.

Parameters are float64 and irregular, so that no symmetry hides a wrong sign. Every latent reads
parameters in the guide and in the model. Call ``case.params()`` before use: it clears the param store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints

from pyro_bpq.testing import TwoPoint, exact_gradient

EXACT: dict[Any, dict[str, Tensor]] = {}


class Die(dist.TorchDistribution):
    """A die whose faces are values of its own."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_enumerate_support = True

    def __init__(self, logits: Tensor, faces: Tensor) -> None:
        super().__init__(logits.shape[:-1], validate_args=False)
        self.law, self.faces = dist.Categorical(logits=logits), faces

    def enumerate_support(self, expand: bool = True) -> Tensor:
        return self.faces

    def log_prob(self, value: Tensor) -> Tensor:
        return self.law.log_prob((value.unsqueeze(-1) == self.faces).long().argmax(-1))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self.faces[self.law.sample(sample_shape)]


@dataclass(frozen=True)
class Case:
    """A model and guide.

    ``num_states`` counts the joint outcomes of one particle. ``is_static`` is False where Python looks
    at a latent (or writes it into a buffer): dependencies then escape a tracker of tensors. The flags
    ``trace_is_unbiased`` and ``tracegraph_is_unbiased`` say where Pyro's estimators are right.
    """

    name: str
    model: Callable[..., Any]
    guide: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    num_states: int = 0
    args: tuple[Any, ...] = ()
    constraints: tuple[tuple[str, Any], ...] = ()
    is_static: bool = True
    is_vectorisable: bool = True
    has_reparameterised: bool = False
    trace_is_unbiased: bool = True
    tracegraph_is_unbiased: bool = True

    def params(self, seed: int | None = None) -> Case:
        """Puts the parameters into a cleared param store, and sets a seed."""
        if seed is not None:
            pyro.set_rng_seed(seed)
        pyro.clear_param_store()
        given = dict(self.constraints)
        for position, (name, shape) in enumerate(self.shapes.items()):
            value = irregular(*shape, start=position + 1)
            constraint = given.get(name, constraints.real)
            pyro.param(name, torch.distributions.transform_to(constraint)(value), constraint=constraint)
        return self

    @property
    def programs(self) -> tuple[Any, ...]:
        """What an objective is called with."""
        return self.model, self.guide, *self.args

    def exact(self) -> dict[str, Tensor]:
        """The exact gradient at the parameters of ``params``, worked out once."""
        key = self.name, self.model, self.guide
        if key not in EXACT:
            self.params()
            EXACT[key] = exact_gradient(*self.programs)
        return EXACT[key]


def sizes(text: str) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters by name: ``"a b:2,3"`` has a number and a matrix."""
    pairs = (part.partition(":") for part in text.split())
    return {name: tuple(map(int, shape.split(","))) if shape else () for name, _, shape in pairs}


def irregular(*shape: int, start: int = 0) -> Tensor:
    """Fixed numbers in (-1.2, 1.2) without pattern, of the given shape."""
    size = torch.Size(shape).numel()
    return 1.2 * torch.sin(1.7 * torch.arange(size, dtype=torch.float64) + 2.3 * start + 0.4).reshape(shape)


def fill(names: tuple[str, ...], *shape: int) -> None:
    """Puts parameters of one shape into a cleared param store."""
    pyro.clear_param_store()
    for i, name in enumerate(names):
        pyro.param(name, irregular(*shape, start=i + 1))


def real(*numbers: Any) -> Tensor:
    """Float64 numbers, or rows of them."""
    return torch.tensor(numbers, dtype=torch.float64)


def coin(name: str, logits: Tensor, **kwargs: Any) -> Tensor:
    return pyro.sample(name, dist.Bernoulli(logits=logits), **kwargs)


def bit(name: str, logits: Tensor) -> Tensor:
    """A coin as an index."""
    return coin(name, logits).long()


def observe(name: str, mean: Tensor, value: Any) -> None:
    pyro.sample(name, dist.Normal(mean, 0.8), obs=torch.as_tensor(value, dtype=torch.float64))


p = pyro.param


def chain_model() -> None:
    a = coin("a", p("pa")).long()
    b = pyro.sample("b", dist.Categorical(logits=p("pb")[a]))
    c = coin("c", p("pc")[b])
    observe("x", p("mean")[b] + 1.3 * c, 0.7)


def chain_guide() -> None:
    a = coin("a", p("qa")).long()
    b = pyro.sample("b", dist.Categorical(logits=p("qb")[a]))
    coin("c", p("qc")[b])


CHAIN = sizes("pa pb:2,3 pc:3 mean:3 qa qb:2,3 qc:3")


def fork_model() -> None:
    a = coin("a", p("pa")).long()
    b, c = coin("b", p("pb")[a]), coin("c", p("pc")[a])
    observe("x", p("mean")[0] + 1.1 * b, 0.4)
    observe("y", p("mean")[1] - 0.9 * c, -0.6)


def fork_guide() -> None:
    a = coin("a", p("qa")).long()
    coin("b", p("qb")[a])
    coin("c", p("qc")[a])


def diamond_model() -> None:
    a = coin("a", p("pa")).long()
    b, c = coin("b", p("pb")[a]).long(), coin("c", p("pc")[a]).long()
    d = coin("d", p("pd")[a, b, c])
    observe("x", p("mean")[a, b] + 1.2 * d * (1 + c), 1.1)


def diamond_guide() -> None:
    a = coin("a", p("qa")).long()
    b, c = coin("b", p("qb")[a]).long(), coin("c", p("qc")[a]).long()
    coin("d", p("qd")[a, b, c])


DIAMOND = sizes("pa pb:2 pc:2 pd:2,2,2 mean:2,2 qa qb:2 qc:2 qd:2,2,2")

ROWS = real(0.3, -0.8, 1.4, 0.5)


def plate_model(data: Tensor, subsample_size: int | None = None) -> None:
    with pyro.plate("rows", len(data), subsample_size) as rows:
        z = coin("z", p("pz"))
        observe("x", p("mean") + 1.5 * z, data[rows])


def plate_guide(data: Tensor, subsample_size: int | None = None) -> None:
    with pyro.plate("rows", len(data), subsample_size) as rows:
        coin("z", p("qz")[rows] + p("slope") * data[rows])


PLATE = sizes("pz mean slope qz:4")


def global_model(data: Tensor, subsample_size: int | None = None) -> None:
    g = pyro.sample("g", dist.Categorical(logits=p("pg")))
    with pyro.plate("rows", len(data), subsample_size) as rows:
        z = coin("z", p("pz")[g])
        observe("x", p("mean")[g] + 1.5 * z, data[rows])


def global_guide(data: Tensor, subsample_size: int | None = None) -> None:
    g = pyro.sample("g", dist.Categorical(logits=p("qg")))
    with pyro.plate("rows", len(data), subsample_size) as rows:
        coin("z", p("qz")[g] + p("slope") * data[rows])


GLOBAL = sizes("pg:2 pz:2 mean:2 qg:2 qz:2 slope")


def subsample_model(data: Tensor) -> None:
    g = coin("g", p("pg")).long()
    with pyro.plate("rows", len(data), 2) as rows:
        observe("x", p("mean")[g], data[rows])


def subsample_guide(data: Tensor) -> None:
    coin("g", p("qg"))


def discrete_reparam_model() -> None:
    z = coin("z", p("pz")).long()
    x = pyro.sample("x", dist.Normal(p("prior")[z], 1.1))
    observe("y", p("mean")[z] + x**2, 0.6)


def discrete_reparam_guide() -> None:
    z = coin("z", p("qz")).long()
    pyro.sample("x", TwoPoint(p("loc")[z], p("scale")[z]))


DISCRETE_REPARAM = sizes("pz prior:2 mean:2 qz loc:2 scale:2")


def reparam_discrete_model() -> None:
    x = pyro.sample("x", dist.Normal(p("prior"), 1.1))
    z = coin("z", p("pz") * x)
    observe("y", p("mean") * x * (1 + z), 0.6)


def reparam_discrete_guide() -> None:
    x = pyro.sample("x", TwoPoint(p("loc"), p("scale")))
    coin("z", p("qz")[0] + p("qz")[1] * x)


REPARAM_DISCRETE = sizes("pz prior mean qz:2 loc scale")


def reparam_plate_model(data: Tensor) -> None:
    with pyro.plate("rows", len(data)):
        z = coin("z", p("pz")).long()
        x = pyro.sample("x", dist.Normal(p("prior"), 0.9).to_event(1))
        observe("y", p("mean")[z] + x.sum(-1) ** 2, data)


def reparam_plate_guide(data: Tensor) -> None:
    with pyro.plate("rows", len(data)):
        z = coin("z", p("qz")).long()
        pyro.sample("x", TwoPoint(p("loc")[z], p("scale")).to_event(1))


REPARAM_PLATE = sizes("pz prior:2 mean:2 qz:2 loc:2,2 scale:2")


def vector_model() -> None:
    z = pyro.sample("z", dist.Bernoulli(logits=p("pz")).to_event(1))
    observe("x", (z * p("mean")).sum(-1) ** 2, 0.9)


def vector_guide() -> None:
    pyro.sample("z", dist.Bernoulli(logits=p("qz")).to_event(1))


def layers_model() -> None:
    top = pyro.sample("top", dist.Bernoulli(logits=p("ptop")).to_event(1))
    low = pyro.sample("low", dist.Bernoulli(logits=top @ p("plow")).to_event(1))
    pyro.sample("x", dist.Bernoulli(logits=low @ p("px")).to_event(1), obs=real(1.0, 0.0, 1.0))


def layers_guide() -> None:
    low = pyro.sample("low", dist.Bernoulli(logits=p("qlow")).to_event(1))
    pyro.sample("top", dist.Bernoulli(logits=low @ p("qtop") + 0.2).to_event(1))


def component_plate_model(data: Tensor) -> None:
    with pyro.plate("rows", len(data)):
        z = pyro.sample("z", dist.Bernoulli(logits=p("pz")).to_event(1))
        w = coin("w", p("pw") + z[..., 0])
        with poutine.mask(mask=data > 0), poutine.scale(scale=1.5):
            mean = torch.stack([p("mean")[0] * z[..., 1], w - 2.0 * z[..., 1]], -1)
            pyro.sample("x", dist.Normal(mean, 0.8).to_event(1), obs=torch.stack([data, -data], -1))
        observe("y", z.exp().flip(-1)[..., 0] * p("mean")[1], data)


def component_plate_guide(data: Tensor) -> None:
    with pyro.plate("rows", len(data)):
        z = pyro.sample("z", dist.Bernoulli(logits=p("qz")).to_event(1))
        coin("w", p("qw")[z[..., 1].long()])


COMPONENT_PLATE = sizes("pz:2 pw mean:2 qz:1,2 qw:2")


def component_chain_model() -> None:
    z = pyro.sample("z", dist.Bernoulli(logits=p("pz")).to_event(1))
    y = pyro.sample("y", dist.Bernoulli(logits=p("py") * z - 0.3).to_event(1))
    pyro.sample("x", dist.Normal(y * p("mean"), 0.8).to_event(1), obs=real(0.9, -0.4))
    observe("both", y.sum(-1) * p("pair"), 0.9)


def component_chain_guide() -> None:
    z = pyro.sample("z", dist.Bernoulli(logits=p("qz")).to_event(1))
    pyro.sample("y", dist.Bernoulli(logits=p("qy") * (2.0 * z - 0.7)).to_event(1))


COMPONENT_CHAIN = sizes("pz:2 py:2 mean:2 pair qz:2 qy:2")


def onehot_model() -> None:
    z = pyro.sample("z", dist.OneHotCategorical(logits=p("pz")))
    y = coin("y", (z * p("py")).sum(-1))
    observe("x", (z * p("mean")).sum(-1) + y, 0.3)


def onehot_guide() -> None:
    z = pyro.sample("z", dist.OneHotCategorical(probs=p("qz")))
    coin("y", (z * p("qy")).sum(-1))


def pair_model() -> None:
    z = coin("z", p("pz"))
    observe("x", p("mean") + 1.5 * z, 0.7)


def auxiliary_guide() -> None:
    a = coin("a", p("qa"), infer={"is_auxiliary": True}).long()
    coin("z", p("qz")[a])


def factor_model() -> None:
    a, b = coin("a", p("pa")), coin("b", p("pb"))
    pyro.factor("agree", p("weight") * a * b - 0.4 * b)


def factor_guide() -> None:
    a = coin("a", p("qa")).long()
    coin("b", p("qb")[a])


def guide_factor_guide() -> None:
    z = coin("z", p("qz")[0])
    pyro.factor("penalty", p("weight") * (z - 0.3), has_rsample=False)


MASK = torch.tensor([True, False, True])


def mask_scale_model() -> None:
    with pyro.plate("rows", 3), poutine.mask(mask=MASK):
        z = coin("z", p("pz"))
        with poutine.scale(scale=2.5):
            observe("x", p("mean") + z, real(0.2, 1.0, -0.4))
    with poutine.scale(scale=0.7):
        w = coin("w", p("pw"))
    observe("y", p("mean") * w + z.sum(-1, keepdim=True), 0.5)


def mask_scale_guide() -> None:
    with pyro.plate("rows", 3), poutine.mask(mask=MASK):
        z = coin("z", p("qz"))
    with poutine.scale(scale=0.7):
        coin("w", p("qw")[0] + p("qw")[1] * z.sum(-1, keepdim=True))


def obs_mask_model() -> None:
    with pyro.plate("rows", 3):
        z = pyro.sample("z", dist.Bernoulli(logits=p("pz")), obs=real(1.0, 0.0, 0.0), obs_mask=MASK)
        observe("x", p("mean") + z, real(0.2, 1.0, -0.4))


def obs_mask_guide() -> None:
    with pyro.plate("rows", 3), poutine.mask(mask=~MASK):
        coin("z_unobserved", p("qz"))


def nested_model() -> None:
    with pyro.plate("outer", 2, dim=-2):
        u = coin("u", p("pu"))
        with pyro.plate("inner", 2, dim=-1):
            z = coin("z", p("pz") + 0.8 * u)
            observe("x", p("mean") * u + z, irregular(2, 2, start=20))


def nested_guide() -> None:
    with pyro.plate("outer", 2, dim=-2):
        u = coin("u", p("qu"))
        with pyro.plate("inner", 2, dim=-1):
            coin("z", p("qz") + p("slope") * u)


def sequential_model(subsample_size: int | None = None) -> None:
    g = coin("g", p("pg"))
    for i in pyro.plate("steps", 3, subsample_size):
        z = coin(f"z_{i}", p("pz")[i] + 0.5 * g)
        observe(f"x_{i}", p("mean") + z * (1 + g), 0.3 * i)


def sequential_guide(subsample_size: int | None = None) -> None:
    g = coin("g", p("qg"))
    for i in pyro.plate("steps", 3, subsample_size):
        coin(f"z_{i}", p("qz")[i] + p("slope") * g)


SEQUENTIAL = sizes("pg pz:3 mean qg qz:3 slope")


def python_branch_model() -> None:
    z = coin("z", p("pz"))
    if z.item():
        w = coin("w", p("pw"))
        observe("x", p("mean")[0] + w, 1.6)
    else:
        observe("x", p("mean")[1], 1.6)


def python_branch_guide() -> None:
    if coin("z", p("qz")).item():
        coin("w", p("qw"))


def drawn_length(side: str) -> int:
    length, go = 0, True
    while go and length < 3:
        go = bool(coin(f"go_{length}", p(side)[length]))
        length += 1
    return length


def dynamic_sites_model() -> None:
    observe("x", p("mean") * drawn_length("pgo"), 1.3)


def dynamic_sites_guide() -> None:
    drawn_length("qgo")


def python_table_model() -> None:
    means = [p("low"), p("middle"), p("high")]
    k = pyro.sample("k", dist.Categorical(logits=p("pk")))
    observe("x", means[int(k)], 0.9)


def python_table_guide() -> None:
    pyro.sample("k", dist.Categorical(logits=p("qk")))


def buffer_model() -> None:
    buffer = torch.zeros(3, dtype=torch.float64)
    for i in range(3):
        buffer[i] = coin(f"z_{i}", p("pz")[i])
    observe("x", (buffer * p("mean")).sum(), 0.8)


def buffer_guide() -> None:
    for i in range(3):
        coin(f"z_{i}", p("qz")[i])


def shared_model() -> None:
    a, b = coin("a", p("both")[0]), coin("b", p("both")[1])
    observe("x", p("both")[0] + a * b, 0.5)


def shared_guide() -> None:
    a = coin("a", p("both")[0] + p("q"))
    coin("b", p("both")[1] + p("q") * a)


def reordered_guide() -> None:
    c = coin("c", p("qc"))
    b = pyro.sample("b", dist.Categorical(logits=p("qb") * (0.3 + c).unsqueeze(-1)))
    coin("a", p("qa")[b] - 0.6 * c)


def constrained_model() -> None:
    k = pyro.sample("k", dist.Categorical(probs=p("pk")))
    pyro.sample("x", dist.Normal(p("mean")[k], p("noise")), obs=real(0.7)[0])


def constrained_guide() -> None:
    pyro.sample("k", dist.Categorical(probs=p("qk")))


PYTHON: dict[str, Any] = {"is_static": False, "is_vectorisable": False, "tracegraph_is_unbiased": False}
SCALED: dict[str, Any] = {"constraints": (("scale", constraints.positive),), "has_reparameterised": True}
SIMPLEX = constraints.simplex
BOUNDED = (("pk", SIMPLEX), ("noise", constraints.positive), ("qk", SIMPLEX))
# Where neither of Pyro's estimators is right.
BIASED: dict[str, Any] = {"trace_is_unbiased": False, "tracegraph_is_unbiased": False}
CASES = [
    Case("chain", chain_model, chain_guide, CHAIN, 12),
    Case("fork", fork_model, fork_guide, sizes("pa pb:2 pc:2 mean:2 qa qb:2 qc:2"), 8),
    Case("diamond", diamond_model, diamond_guide, DIAMOND, 16),
    Case("plate", plate_model, plate_guide, {**PLATE, "qz": (3,)}, 8, (ROWS[:3],)),
    Case("plate_subsample", plate_model, plate_guide, PLATE, 24, (ROWS, 2)),
    Case("global_local", global_model, global_guide, GLOBAL, 16, (ROWS[:3],)),
    Case("global_local_subsample", global_model, global_guide, GLOBAL, 24, (ROWS[:3], 2)),
    Case("model_subsample", subsample_model, subsample_guide, sizes("pg mean:2 qg"), 12, (ROWS,)),
    Case("component_plate", component_plate_model, component_plate_guide, COMPONENT_PLATE, 8, (real(0.7),)),
    Case("component_chain", component_chain_model, component_chain_guide, COMPONENT_CHAIN, 16),
    Case("discrete_above_reparam", discrete_reparam_model, discrete_reparam_guide, DISCRETE_REPARAM, 4, **SCALED),
    Case("reparam_above_discrete", reparam_discrete_model, reparam_discrete_guide, REPARAM_DISCRETE, 4, **SCALED),
    Case("reparam_in_plate", reparam_plate_model, reparam_plate_guide, REPARAM_PLATE, 64, (ROWS[:2],), **SCALED),
    Case("vector", vector_model, vector_guide, sizes("pz:3 mean:3 qz:3"), 8),
    Case("vector_layers", layers_model, layers_guide, sizes("ptop:2 plow:2,2 px:2,3 qlow:2 qtop:2,2"), 16),
    Case("onehot", onehot_model, onehot_guide, sizes("pz:3 py:3 mean:3 qz:3 qy:3"), 6, constraints=(("qz", SIMPLEX),)),
    Case("auxiliary", pair_model, auxiliary_guide, sizes("pz mean qa qz:2"), 4, trace_is_unbiased=False),
    Case("factor", factor_model, factor_guide, sizes("pa pb weight qa qb:2"), 4),
    Case("guide_factor", pair_model, guide_factor_guide, sizes("pz mean weight qz:1"), 2, **BIASED),
    Case("mask_scale", mask_scale_model, mask_scale_guide, sizes("pz mean pw qz:3 qw:2"), 16),
    Case("obs_mask", obs_mask_model, obs_mask_guide, sizes("pz mean qz:3"), 8),
    Case("nested_plates", nested_model, nested_guide, sizes("pu pz mean qu:2,1 qz:2,2 slope"), 64),
    Case("sequential_plate", sequential_model, sequential_guide, SEQUENTIAL, 16),
    Case("sequential_subsample", sequential_model, sequential_guide, SEQUENTIAL, 24, (2,)),
    Case("python_branch", python_branch_model, python_branch_guide, sizes("pz pw mean:2 qz qw"), 3, **PYTHON),
    Case("dynamic_sites", dynamic_sites_model, dynamic_sites_guide, sizes("pgo:3 mean qgo:3"), 4, **PYTHON),
    Case("python_table", python_table_model, python_table_guide, sizes("pk:3 low middle high qk:3"), 3, **PYTHON),
    Case("inplace_buffer", buffer_model, buffer_guide, sizes("pz:3 mean:3 qz:3"), 8, **PYTHON),
    Case("shared_parameters", shared_model, shared_guide, sizes("both:2 q"), 4),
    Case("reordered_guide", chain_model, reordered_guide, {**CHAIN, "qa": (3,), "qb": (3,), "qc": ()}, 12),
    Case("constrained", constrained_model, constrained_guide, sizes("pk:3 mean:3 noise qk:3"), 3, constraints=BOUNDED),
]

BY_NAME = {case.name: case for case in CASES}


def each_case(keep: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    """Parametrises a test over ``case``, those for which ``keep`` holds."""
    return pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES if keep(c)])
