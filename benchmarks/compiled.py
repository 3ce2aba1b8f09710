r"""Whether ``torch.jit.trace`` or ``torch.compile`` of a step would pay on a CPU.

A step is ``differentiable_loss`` and its ``backward``, without optimiser, on programs of ``overhead.py``: plain, traced by
``torch.jit.trace`` (as Pyro's ``JitTrace_ELBO`` does), and compiled by ``torch.compile``. Our ELBO is in ``eval()`` mode
with a cached structure: critics are trained but do not learn, since a traced step cannot train them. *agrees* compares
losses and gradients of ten seeds with those of the plain step, after the step was compiled at another seed.

    python benchmarks/compiled.py [--full] [--output DIRECTORY]
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping

import pyro
import pyro.ops.jit
import torch
from common import Row, arguments, median, table, write_csv, write_markdown
from overhead import Program, belief_network, chain, cpu_seconds
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_bpq import TraceBackpropQ_ELBO

Step = Callable[[], Tensor]


def parameters() -> list[Tensor]:
    """The leaves of the param store."""
    return [value for _, value in sorted(pyro.get_param_store().named_parameters())]


def plain(loss: Step) -> Step:
    """The loss as it is."""
    return loss


def traced(loss: Step) -> Step:
    """The loss traced as a function of the parameters, by the tool behind Pyro's own Jit classes."""
    return pyro.ops.jit.trace(loss, ignore_warnings=True, jit_options={"check_trace": False})


def compiled(loss: Step) -> Step:
    """The loss compiled, with graph breaks where the compiler needs them."""
    torch._dynamo.reset()
    return torch.compile(loss)


WAYS: Mapping[str, Callable[[Step], Step]] = {"plain": plain, "torch.jit.trace": traced, "torch.compile": compiled}


def backward(step: Step) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one step."""
    for leaf in parameters():
        leaf.grad = None
    loss = step()
    loss.backward()
    return loss.item(), [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters()]


def agrees(step: Step, reference: Step) -> bool:
    """Whether ten seeds give the same losses and gradients."""
    for seed in range(10):
        found = []
        for each in (step, reference):
            pyro.set_rng_seed(seed)
            found.append(backward(each))
        (left, grads), (right, expected) = found
        if abs(left - right) > 1e-4 * abs(right):
            return False
        if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(grads, expected, strict=True)):
            return False
    return True


def measure(name: str, program: Program, rounds: int) -> list[Row]:
    """All ways for Pyro's and for our ELBO."""
    rows: list[Row] = []
    for elbo_name, elbo in (("Trace_ELBO", Trace_ELBO()), ("default", TraceBackpropQ_ELBO())):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        svi = SVI(*program, Adam({"lr": 1e-3}), elbo)
        for _ in range(20):
            svi.step()
        if isinstance(elbo, nn.Module):
            elbo.eval()

        def loss(elbo: Trace_ELBO | TraceBackpropQ_ELBO = elbo) -> Tensor:
            return elbo.differentiable_loss(*program)

        steps: dict[str, Step] = {}
        for way, make in WAYS.items():
            start = time.perf_counter()
            try:
                pyro.set_rng_seed(100)
                step = make(loss)
                backward(step)
                backward(step)
                row = {"seconds to make": time.perf_counter() - start, "agrees": agrees(step, loss), "failed": ""}
                steps[way] = step
            except Exception as error:
                lines = str(error).strip().splitlines()
                row = {"seconds to make": "", "agrees": "", "failed": f"{type(error).__name__}: {(lines or [''])[0][:90]}"}
            rows.append({"program": name, "elbo": elbo_name, "way": way, **row})
        times = cpu_seconds({way: (lambda s=step: backward(s)) for way, step in steps.items()}, rounds, 30.0)
        for row in rows:
            if row["elbo"] == elbo_name:
                values = times.get(row["way"])
                row["milliseconds"] = "" if values is None else 1000 * median(values)
    return rows


def main() -> None:
    """Measures, prints, and writes CSV and Markdown."""
    options = arguments(__doc__)
    warnings.filterwarnings("ignore")
    programs = {"chain, 50 sites": chain(50, False), "belief network 64-20-20": belief_network(64, 20)}
    rows = [row for name, program in programs.items() for row in measure(name, program, 200 if options.full else 30)]
    write_csv(options.output / "compiled.csv", rows)
    text = table(rows)
    write_markdown(options.output / "compiled.md", "Traced and compiled steps", [text])
    print(text)


if __name__ == "__main__":
    main()
