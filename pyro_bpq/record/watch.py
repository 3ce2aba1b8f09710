r"""Watches a run of guide and model: values that leave torch, draws, and values that carry gradients.

Below stand what others ask of the sites of a trace, and of the leaves that collect gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.util import is_identically_zero
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from pyro_bpq.errors import UnsupportedProgramError, UnsupportedSiteError
from pyro_bpq.estimators.base import Estimator, SiteInfo
from pyro_bpq.graph.scg import Plate
from pyro_bpq.record.calls import is_of_library
from pyro_bpq.record.config import SiteOptions, cost_options, site_options
from pyro_bpq.record.key import Call, attributes_of
from pyro_bpq.record.laws import Draw, rebased, tensors_of
from pyro_bpq.record.statements import Answers, check_particles, link, linked, owner_of
from pyro_bpq.record.tape import Tape, same
from pyro_bpq.record.values import tensors_in
from pyro_bpq.rollout.features import base_distribution, count_components, finite_components

# Pyro's name of the plate of vectorised particles.
PARTICLES = "num_particles_vectorized"


@dataclass(frozen=True)
class TraceOptions:
    """How programs are run, and what is recorded of the run."""

    choose: Callable[[SiteInfo, SiteOptions], Estimator]  # returns the estimator of a site
    max_plate_nesting: float = math.inf  # bound on the number of nested plates, for Pyro's shape checks
    num_particles: int = 1  # number of particles in all runs of the step
    estimator: Estimator | None = None  # that of sites that name none, if the user has chosen one
    track: bool = False  # whether the run is recorded
    call: Call = field(default_factory=Call)  # what the call of the programs looks like
    noise: Callable[[], torch.Generator] = torch.Generator  # makes the generator that such estimators draw from
    only_costs: bool = False  # whether only cost statements count; the guide is then the whole program
    jumps: frozenset[str] = frozenset()  # reparameterised sites that are scored, because costs jump with their values
    step: int = 0  # number of steps taken, for estimators with a schedule
    warns: bool = True  # whether to warn of likely mistakes; values that nobody drew may be impossible
    answers: Answers = field(default_factory=Answers)  # what external functions have answered in the step so far
    has_told: bool = False  # whether another run of the step has warned of those in the program


class Watch(Messenger):
    """Records what has left torch before each statement, and gives programs tracked values.

    It must be the outermost handler, so that the traces record the tracked values.
    """

    def __init__(self, options: TraceOptions, inputs: Mapping[int | str, Any], tape: Tape | None = None) -> None:
        super().__init__()
        self.options, self.inputs, self.tape = options, inputs, tape
        self.where = "guide"  # which program is running, `"guide"` or `"model"`
        self.met = {"guide": dict[str, Any](), "model": dict[str, Any]()}  # the statements of each program
        self.enumerated, self.given = set[str](), set[str]()
        self.attached = dict[str, Any]()
        self.untraced = dict[str, dict[str, Any]]()
        self.subsamples = dict[str, Any]()
        self.escaped = dict[tuple[bool, str], int]()  # sources, as bits, that had left torch at the end of a statement
        self.drawn = dict[str, Any]()  # values of sites on the tape
        # External functions that were called, one of each object, and the attributes of it that they change.
        self.externals = dict[int, tuple[Any, set[str]]]()
        self.memories = dict[int, list[Tensor]]()  # what stands for what they remember, by the object that is called

    @property
    def is_guide(self) -> bool:
        """Whether the guide runs."""
        return self.where == "guide"

    @functools.cached_property
    def _noise(self) -> torch.Generator:
        """What estimators draw from that attach gradients, made when the first one does."""
        return self.options.noise()

    def _pyro_sample(self, msg: Any) -> None:
        if not self.is_guide:
            drawn = self.met["guide"].get(msg["name"])
            if msg["is_observed"] and not (drawn is None or drawn["is_observed"] or cost_options(msg)):
                # The value that it scores is not the one that the guide has drawn.
                msg["name"] += " (observed)"
            return
        if msg["done"]:
            self.given.add(msg["name"])
        if not msg["is_observed"] and has_rsample(msg) and not self._is_pathwise(msg):
            msg["fn"] = rebased(msg["fn"], lambda base: base, has_rsample=False)

    def _pyro_post_sample(self, msg: Any) -> None:
        name = msg["name"]
        if isinstance(msg["fn"], _Subsample):
            self.subsamples[name] = msg["value"]
        else:
            self.met[self.where][name] = msg
            if is_enumerated(msg):
                self._enumerate(msg)
            elif self.is_guide and not msg["is_observed"]:
                self._draw(msg)
        if self.tape is not None:
            self.escaped[self.is_guide, name] = self.tape.steering

    def _draw(self, msg: Any) -> None:
        """Makes the value that the guide has drawn a source."""
        name = msg["name"]
        self._attach(msg)
        score: Any = None
        if is_untraced(msg):
            if torch.is_grad_enabled() and isinstance(msg["value"], Tensor):
                score = msg["fn"].score_parts(msg["value"]).score_function
            # Otherwise the value carries all gradients.
            if score is None or is_identically_zero(score):
                return
        if self.tape is not None and isinstance(msg["value"], Tensor):
            law = tensors_of(msg["fn"])
            if self.options.num_particles > 1:  # reads how many values there are, which may tell particles apart
                finite_components(msg["fn"])
            if self.enumerated and self._is_pathwise(msg) and self.enumerated & self.tape.sources_of(law):
                return  # It is drawn once for each value of an enumerated site, as other noise of the program.
            msg["value"] = self.tape.source(name, msg["value"])
            self.drawn[name] = self.tape.drawn(msg["value"], Draw(name, msg["fn"]), law)
        if score is not None:
            self._keep(msg, score)

    def _choose(self, msg: Any) -> Estimator:
        info = site_info(msg, (), self.options.num_particles)
        return self.options.choose(info, site_options(msg["name"], msg["infer"]))

    def _is_pathwise(self, msg: Any) -> bool:
        """Whether the value of a site of the guide carries all of its gradient."""
        is_left = msg["name"] not in self.options.jumps or site_options(msg["name"], msg["infer"]).estimator is not None
        return has_rsample(msg) and is_left and self._choose(msg).is_pathwise

    def _pyro_bpq_cost(self, msg: Any) -> None:
        # A cost with exact=True may be evaluated for many rows at once. A read in Python would see all of them.
        if self.tape is not None and not msg["infer"]["exact"]:
            self.tape.open_call()

    def _pyro_post_bpq_cost(self, msg: Any) -> None:
        for frame in msg["cond_indep_stack"]:
            if frame.name == PARTICLES and isinstance(msg["value"], Tensor):
                check_particles(msg["args"][0], msg["args"][3:], msg["value"], frame.size, frame.dim)
        if self.tape is not None and not msg["infer"]["exact"]:
            (_, _, function, *given), result = msg["args"], msg["value"]
            owner, is_plain = owner_of(function), type(function) is FunctionType and not is_of_library(function)
            is_told = is_plain and msg["infer"]["is_called"] and not self.tape.has_read
            # It depends on earlier calls of the same object, too.
            mask = self.tape.close_call([given, self.memories.get(id(owner), ())], result)
            # What stays in torch is told by its operators, unless a part of it runs where the tape does not look.
            if not is_told or mask != self.tape.mask_of(result):
                self.tape.made(same, (result,), result, mask)
                self.memories.update({} if owner is None else {id(owner): [result]})
                self.tape.hide(result, "a function of a cost")

    def _pyro_bpq_external(self, msg: Any) -> None:
        (external, *given), tape = msg["args"], self.tape
        state = self.externals.get(id(external.owner), (external, set[str]()))[1]
        self.externals[id(external.owner)] = external, state
        msg["done"] = True
        if tape is None:
            msg["value"] = self.options.answers.to(external, *given)
            return
        before = attributes_of(external.owner)
        self._hand(tape, external, given)
        tape.open_call()
        msg["value"] = self.options.answers.to(external, *given)
        after = attributes_of(external.owner)
        state |= {name for name in before | after if before.get(name) != after.get(name)}
        self._answered(tape, external, [*tensors_in(given)], [*tensors_in(msg["value"])], msg)

    def _hand(self, tape: Tape, external: Any, given: Any) -> None:
        """Checks that no gradient ends in an external function."""
        sites = [name for name in sorted(tape.sources_of(given)) if self._drawn(name)["value"].requires_grad]
        if sites or any(tensor.requires_grad for tensor in tensors_in(given)):
            carriers = f"of the reparameterised site {sites[0]!r}" if sites else "of what it is handed"
            raise UnsupportedSiteError(
                f"No gradient passes through {external.name}, but that {carriers} would have to. Give such a site "
                'infer={"bpq": {"estimator": ScoreFunction()}}; hand over w.detach() of a function w of parameters.'
            )

    def _answered(self, tape: Tape, external: Any, handed: list[Tensor], results: list[Tensor], msg: Any) -> None:
        """Notes that results read what was handed over, now and earlier."""
        owner, mask = id(external.owner), tape.close_call(handed, results)
        read = [*handed, *self.memories.get(owner, ())]
        names = tape.sources_of(read)
        if unseen := sorted(tape.names(mask) - names):
            raise UnsupportedProgramError(
                f"The values of {', '.join(unseen)} are read in {external.name}, but were not handed to it. Give them "
                "as an argument; or, if another external function was handed them, make both methods of one object."
            )
        if not self.enumerated.isdisjoint(names):
            tape.steer(mask)
        around = [msg, *map(self._drawn, names)] if external.rowwise else []
        frames = {(frame.dim, frame.size) for site in around for frame in plates_of(site)}
        sizes = dict(frames) if len(dict(frames)) == len(frames) else {}  # else rows of unlike plates
        dims = [{f.dim for name in tape.sources_of(own) for f in plates_of(self._drawn(name))} for own in read]
        memory = link(zip(read, dims, strict=True), tuple(sizes.get(dim, 1) for dim in range(min(sizes, default=0), 0)))
        self.memories[owner] = [memory]
        for result in results:
            tape.made(same, (linked(result, memory),), result)
        tape.hide(results, external.name)

    def _drawn(self, name: str) -> Any:
        """The statement of a source."""
        return self.met["guide"].get(name) or self.met["model"][name]

    def _enumerate(self, msg: Any) -> None:
        """Makes the values of an enumerated site a source, to detect if they leave torch."""
        if self.tape is not None and msg["name"] not in self.enumerated:
            support = self.tape.value_of(msg["value"])
            msg["value"] = self.tape.source(msg["name"], msg["value"])
            self.tape.drawn(msg["value"], same, (support,))
        self.enumerated.add(msg["name"])

    def _attach(self, msg: Any) -> None:
        """Attaches a gradient to the value of a site, if the estimator of the site does so."""
        name = msg["name"]
        estimator = site_options(name, msg["infer"]).estimator or self.options.estimator
        # A value that was set from outside does not depend on the parameters.
        if estimator is None or not estimator.attaches or name in self.given:
            return
        if (estimator.corrects or not has_rsample(msg)) and self._choose(msg) == estimator:
            try:
                msg["value"] = estimator.at(self.options.step).attach(msg["fn"], msg["value"], self._noise)
            except UnsupportedSiteError as error:
                raise error.at(name) from error
            self.attached[name] = estimator

    def _keep(self, msg: Any, score: Tensor) -> None:
        """Records a site that Pyro leaves out of its traces, although later costs depend on its value."""
        name, zero = msg["name"], torch.zeros_like(score)
        if name in self.untraced:
            raise UnsupportedProgramError(f"Site {name!r} is sampled twice: give untraced sites names of their own.")
        parts = ScoreParts(zero, score, torch.zeros(()))
        self.untraced[name] = {**msg, "log_prob": zero, "log_prob_sum": zero.sum(), "score_parts": parts}

    def steering_of(self, name: str, is_guide: bool) -> int:
        """What Python had read at the end of a statement, as bits."""
        # A GuideMessenger runs guide and model as one program: a model site may be noted as the guide's.
        return self.escaped.get((is_guide, name), self.escaped.get((True, name), 0))

    def guide_sites(self, trace: Any) -> dict[str, Any]:
        """Returns the sites of the guide's trace and the sites that Pyro left out, in the order of draws."""
        sites = samples(trace)
        for name in self.attached.keys() & sites.keys():
            site, estimator = sites[name], self.attached[name]
            score = estimator.correction(site["fn"], site["value"]) if estimator.corrects else 0.0
            parts: Any = (site["log_prob"], score, site["log_prob"])
            sites[name] = {**site, "score_parts": ScoreParts(*parts), "is_attached": True}
        if not self.untraced:
            return sites
        met = (name for name, msg in self.met["guide"].items() if not msg["is_observed"])
        order = {name: i for i, name in enumerate(met) if name not in self.enumerated}
        merged = {**sites, **self.untraced}
        return {name: merged[name] for name in sorted(merged, key=lambda name: order.get(name, len(merged)))}


def has_rsample(site: Any) -> bool:
    """Whether the distribution of a site is reparameterised."""
    return bool(getattr(site["fn"], "has_rsample", False))


def is_enumerated(site: Any) -> bool:
    """Whether a site is enumerated: it takes all of its values at once."""
    return site["infer"].get("_enumerate_dim") is not None


def is_untraced(site: Any) -> bool:
    """Whether Pyro leaves a site out of its traces."""
    return bool(site["infer"].get("_do_not_trace"))


def carried(value: Any) -> dict[str, Tensor]:
    """The tensors that a value carries for its distribution, as the relaxed value of a straight-through one."""
    found = vars(value) if isinstance(value, Tensor) else {}
    return {name: held for name, held in found.items() if isinstance(held, Tensor)}


def leaf_of(value: Any) -> Any:
    """The unconstrained parameter behind a value of ``pyro.param``, or the value itself if there is none."""
    unconstrained = getattr(value, "unconstrained", None)
    return value if unconstrained is None else unconstrained()


def traced_leaves(trace: Any) -> dict[str, Tensor]:
    """The leaf parameters in a trace, by name."""
    values = {name: site["value"] for name, site in trace.nodes.items() if site["type"] == "param"}
    leaves = {name: leaf_of(value) for name, value in values.items() if isinstance(value, Tensor)}
    return {name: leaf for name, leaf in leaves.items() if leaf.is_leaf and leaf.requires_grad}


def gradients_of(value: Tensor, leaves: Sequence[Tensor], **options: Any) -> dict[Tensor, Tensor]:
    """The gradient of a scalar to each of the leaves that it reads; ``options`` are those of ``torch.autograd``."""
    if not (leaves and value.requires_grad):
        return {}
    found = torch.autograd.grad(value, leaves, allow_unused=True, **options)
    return {leaf: gradient for leaf, gradient in zip(leaves, found, strict=True) if gradient is not None}


def inputs_of(*totals: Tensor, blocked: Container[str] = ()) -> list[Tensor]:
    """The leaves of an autograd graph that collect gradients; no way leads through ``blocked`` operators."""
    seen, nodes, found = set[Any]((None,)), [total.grad_fn for total in totals], list[Tensor]()
    while nodes:
        node: Any = nodes.pop()
        if node in seen or (blocked and node.name().partition("Backward")[0].lower() in blocked):
            continue
        seen.add(node)
        found += [] if getattr(node, "variable", None) is None else [node.variable]
        nodes += [following for following, _ in node.next_functions]
    return found


def plates_of(site: Any) -> tuple[Any, ...]:
    """The vectorised plates around a site, as Pyro's frames."""
    return tuple([frame for frame in site["cond_indep_stack"] if frame.vectorized])


def samples(trace: Any) -> dict[str, Any]:
    """The sample sites of a trace."""
    return {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}


def site_info(site: Any, plates: tuple[Plate, ...], particles: int) -> SiteInfo:
    """Collects the facts about a site that need no tensors."""
    fn = site["fn"]
    return SiteInfo(
        name=site["name"],
        distribution=distribution_name(fn),
        has_rsample=has_rsample(site),
        components=finite_components(fn),
        num_particles=particles,
        plates=tuple(plate.name for plate in plates),
        counts=count_components(fn),
    )


def distribution_name(fn: Any) -> str:
    """Name of a distribution, without wrappers."""
    return type(base_distribution(fn)).__name__
