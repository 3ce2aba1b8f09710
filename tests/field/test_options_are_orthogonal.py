"""Options about critics change critics; what else an option turns off, or leaves as it is, is said."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from steps import coins, filtered, seeing, unbiased, warnings_of
from steps import trained as after

from pyro_bpq import (
    AllAction,
    CriticLearner,
    MLPCritic,
    Replay,
    ScoreFunction,
    SlowTracking,
    TraceBackpropQ_ELBO,
    TraceBackpropQ_IWAE,
    config_bpq,
)
from pyro_bpq.diagnostics import gradient_moments
from pyro_bpq.short import short

Programs = tuple[Callable[[], None], Callable[[], None]]


def chain(length: int = 10, sums: bool = True, **options: Any) -> Programs:
    """A chain whose costs read several sites, or the last one."""

    def model() -> None:
        z = torch.tensor(0.0)
        for t in range(length):
            own = pyro.sample(f"z_{t}", dist.Bernoulli(logits=0.3 * z - 0.5))
            z = z + own if sums else own
            pyro.sample(f"x_{t}", dist.Normal(z, 1.0), obs=torch.tensor(0.4 * t))

    return model, coins(*(f"z_{t}" for t in range(length)), **options)


def markov(**options: Any) -> Programs:
    """A chain that is summed over all values."""
    return chain(5, False, **options)


def few(**options: Any) -> Programs:
    """Three sites, whose costs read all of them."""

    def model() -> None:
        a, b, c = (pyro.sample(name, dist.Bernoulli(0.4)) for name in "abc")
        pyro.sample("x", dist.Normal(a + b * c, 1.0), obs=torch.tensor(0.7))
        pyro.sample("y", dist.Normal(a * b - c, 1.0), obs=torch.tensor(-0.2))

    return model, coins(*"abc", **options)


ABOUT_CRITICS: dict[str, dict[str, Any]] = {
    "lam": {"lam": 0.9},
    "gamma": {"gamma": 0.99},
    "window": {"window": 6},
    "reduction": {"reduction": "single"},
    "form": {"form": "history"},
    "critic": {"critic": MLPCritic((8,))},
    "rate": {"learner": CriticLearner(lr=0.01)},
    "slow": {"learner": CriticLearner(slow=SlowTracking())},
    "replay": {"learner": CriticLearner(replay=Replay(capacity=4))},
    "the user's optimiser": {"learner": None},
    "immediate": {"immediate": "learned"},
}
AT_A_SITE: dict[str, dict[str, Any]] = {
    "share": {"share": "z"},
    "context": {"context": torch.ones(2)},
    "critic": {"critic": MLPCritic((8,))},
    "none": {"critic": False},
}


def trained(programs: Programs, steps: int = 2, **options: Any) -> TraceBackpropQ_ELBO:
    return after(TraceBackpropQ_ELBO(**options), *programs, steps=steps)


def critics_of(elbo: TraceBackpropQ_ELBO) -> set[Any]:
    return {spec.critic for spec in elbo.plan.layout.specs.values()}


# The number of particles.


@pytest.mark.parametrize("options", ABOUT_CRITICS.values(), ids=ABOUT_CRITICS)
@pytest.mark.parametrize("make", [chain, few])
def test_an_option_about_critics_leaves_the_number_of_particles(make: Any, options: dict[str, Any]) -> None:
    plain, elbo = trained(make()), trained(make(), **options)
    assert elbo.num_particles == plain.num_particles > 1
    assert critics_of(elbo) - {None}
    # In programs of few sites they take the place of other particles as baselines.
    assert ("because you wrote" in str(elbo)) is (make is few)


@pytest.mark.filterwarnings("ignore:Nothing reads the options share")
@pytest.mark.parametrize("options", AT_A_SITE.values(), ids=AT_A_SITE)
@pytest.mark.parametrize("make", [chain, few])
def test_an_option_of_a_site_about_its_critic_leaves_it_too(make: Any, options: dict[str, Any]) -> None:
    plain = trained(make())
    for programs in (make(**options), (make()[0], config_bpq(make()[1], **options))):
        elbo = trained(programs)
        assert elbo.num_particles == plain.num_particles > 1
        if "context" in options or options.get("critic"):
            assert critics_of(elbo) - {None}


def test_a_shared_critic_does_a_chain_no_harm() -> None:
    def variance(**options: Any) -> float:
        programs = chain(**options)
        return gradient_moments(trained(programs, 30), *programs, num_samples=60).total_variance

    assert variance(share="z") < 2.0 * variance()


ONE_PARTICLE: dict[str, tuple[Any, str]] = {
    "estimators": (few(estimator=AllAction()), "you wrote an estimator or a baseline at a, b, c."),
    "no noise": ((seeing(lambda z: z), coins("z")), "no gradient is noisy."),
    "steered": ((seeing(lambda z: 1.0 if z.item() else -1.0), coins("z")), "sampled values steer the program."),
}


@pytest.mark.parametrize(("programs", "why"), ONE_PARTICLE.values(), ids=ONE_PARTICLE)
def test_why_one_particle_runs_is_said(programs: Programs, why: str) -> None:
    elbo = trained(programs)
    assert elbo.num_particles == 1 and f"One particle runs, because {why}" in str(elbo)


def test_an_estimator_at_one_site_leaves_the_number() -> None:
    model, guide = few()
    first, others = coins("a", estimator=AllAction()), coins("b", "c")
    assert trained((model, lambda: (first(), others())[1])).num_particles == trained((model, guide)).num_particles


# All pairs.

OPTIONS: dict[str, Any] = {
    **{"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 2, "retain_graph": True, "seed": 3},
    **{"estimator": ScoreFunction(), "critic": None, "reduction": "merged", "lam": 0.5, "gamma": 0.9, "window": 2},
    **{"learner": CriticLearner(lr=0.02), "structure": "dynamic", "analytic_kl": True, "enumeration": "exact"},
    **{"immediate": "learned", "form": "history"},
}
# What each option names.
NAMED = {
    **{"num_particles": {"number", "way"}, "vectorize_particles": {"way"}, "estimator": {"estimators"}},
    **{"critic": {"critics", "network"}, "immediate": {"critics", "network"}},
    **{name: {"network"} for name in ("reduction", "form", "window")},
}
# What shows that an option holds.
HOLDS: dict[str, Callable[[TraceBackpropQ_ELBO], bool]] = {
    "num_particles": lambda elbo: elbo.num_particles == 3,
    "estimator": lambda elbo: {spec.estimator for spec in elbo.plan.layout.specs.values()} == {ScoreFunction()},
    "critic": lambda elbo: critics_of(elbo) <= {None},
    "structure": lambda elbo: "Every run is recorded" in str(elbo),
}


def chosen(elbo: TraceBackpropQ_ELBO) -> dict[str, Any]:
    """What options may change."""
    specs = elbo.plan.layout.specs
    return {
        "number": elbo.num_particles,
        "way": elbo.num_particles > 1 and elbo.particles.now.way,
        "summed": elbo.plan.sums,
        "estimators": {name: spec.estimator for name, spec in specs.items()},
        "critics": {name: elbo.plan.critic(name) for name in specs},
        "network": str(elbo.network),
    }


PAIRS = [*((name,) for name in OPTIONS), *itertools.combinations(OPTIONS, 2)]
SINGLE = len(OPTIONS)


@pytest.mark.filterwarnings("ignore::pyro_bpq.errors.BPQWarning")
@pytest.mark.parametrize("make", [few, markov])
@pytest.mark.parametrize(
    "names", [*PAIRS[:SINGLE], *(pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS[SINGLE:])], ids=" ".join
)
def test_options_change_what_they_name_or_are_told(make: Any, names: tuple[str, ...]) -> None:
    usual, elbo = chosen(trained(make(), 3)), trained(make(), 3, **{name: OPTIONS[name] for name in names})
    # Without the call that made it.
    text = str(elbo).split("\n", 1)[1] + str(elbo.plan)
    is_told = any(f"{name}={short(OPTIONS[name])}".replace("'", '"') in text.replace("'", '"') for name in names)
    named = {part for name in names for part in NAMED.get(name, ())}
    assert is_told or {part for part, own in chosen(elbo).items() if own != usual[part]} <= named
    assert all(holds(elbo) for name, holds in HOLDS.items() if name in names)


# The sum over all values.


@pytest.mark.parametrize("options", ABOUT_CRITICS.values(), ids=ABOUT_CRITICS)
def test_critics_that_are_asked_for_turn_the_sum_off_and_say_so(options: dict[str, Any]) -> None:
    (name,) = options
    elbo = trained(markov(), steps=55 if name == "lam" else 2, **options)
    assert not elbo.plan.sums and elbo.num_particles > 1
    assert f"It is not summed over all values, because you wrote {name}=" in str(elbo)


@pytest.mark.parametrize("options", [{}, {"critic": None}, {"critic": None, "lam": 0.9}, {"seed": 3}], ids=str)
def test_other_options_leave_the_sum(options: dict[str, Any]) -> None:
    assert trained(markov(), steps=55, **options).plan.sums


def test_options_of_a_site_that_only_name_or_refuse_a_critic_leave_the_sum() -> None:
    assert trained(markov(critic=False), steps=55).plan.sums
    with pytest.warns(UserWarning, match="Nothing reads the options share at z_0 to z_4, 5 sites"):
        assert trained(markov(share="z"), steps=55).plan.sums


def test_a_critic_at_a_site_turns_the_sum_off_and_says_so() -> None:
    elbo = trained(markov(critic=MLPCritic()), steps=55)
    assert not elbo.plan.sums
    assert 'because you wrote infer={"bpq": ...} at z_0 to z_4, 5 sites.' in str(elbo)


# Options that nothing reads.


def warned(programs: Programs, **options: Any) -> list[str]:
    return warnings_of(*programs, steps=3, category=Warning, **options)


UNREAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "context": (few, {"context": torch.ones(2), "estimator": ScoreFunction()}, "context at a, b, c"),
    "critic": (few, {"critic": MLPCritic(), "estimator": ScoreFunction()}, "critic at a, b, c"),
    "share": (few, {"share": "z"}, "share at a, b, c"),
}


@pytest.mark.parametrize(("make", "options", "words"), UNREAD.values(), ids=UNREAD)
def test_an_option_of_a_site_that_nothing_reads_is_told_once(make: Any, options: dict[str, Any], words: str) -> None:
    (text,) = warned(make(**options))
    assert text.startswith(f"Nothing reads the options {words}:")


def test_under_an_estimator_for_all_sites_print_tells_it() -> None:
    """Estimators are compared on programs whose sites have options of their own."""
    programs = few(context=torch.ones(2))
    assert not warned(programs, estimator=ScoreFunction())
    assert "Nothing reads the options context at a, b, c" in str(trained(programs, estimator=ScoreFunction()))


def test_a_bound_tells_it_too() -> None:
    bound = TraceBackpropQ_IWAE(3)
    with pytest.warns(UserWarning, match="Nothing reads the options context at a, b, c"):
        bound.loss_and_grads(*few(context=torch.ones(2)))
    with filtered("error"):
        bound.loss_and_grads(*few(context=torch.ones(2)))


@pytest.mark.parametrize("options", [{"context": torch.ones(2)}, {"critic": MLPCritic()}], ids=str)
@pytest.mark.parametrize("make", [chain, few])
def test_options_that_some_critic_reads_are_left_alone(make: Any, options: dict[str, Any]) -> None:
    assert not warned(make(**options)) and not warned(chain(share="z"))


def test_an_option_about_critics_where_there_are_none_is_said_in_print() -> None:
    elbo = trained(few(), estimator=ScoreFunction(), lam=0.9)
    assert "No site has a critic, so that lam=0.9 changes nothing." in str(elbo)


# They stay unbiased.


@pytest.mark.parametrize("options", ABOUT_CRITICS.values(), ids=ABOUT_CRITICS)
def test_steps_with_several_particles_and_critics_are_unbiased(options: dict[str, Any]) -> None:
    def model() -> None:
        a, b = (pyro.sample(name, dist.Bernoulli(0.4)) for name in "ab")
        pyro.sample("x", dist.Normal(a + 2.0 * a * b, 1.0), obs=torch.tensor(0.7))

    elbo = TraceBackpropQ_ELBO(**{**options, "num_particles": 3, "vectorize_particles": True})
    unbiased(elbo, model, coins("a", "b"), steps=6)
