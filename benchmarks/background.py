"""Replay in a background thread against replay in line, on a chain whose Q-functions are known.

The guide is held, and every variant learns for the same wall-clock time. Reported are steps and replay updates per
second, and the mean squared error of the critics against the exact Q. ``thread, writes locked`` runs programs in both
threads at once and locks what writes to critics: Pyro's handlers and the global generator belong to the process, and it
tells after how many steps that fails. Needs two cores.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pyro
import torch
from common import arguments, table, write_csv, write_markdown
from pyro.infer import SVI
from pyro.optim import Adam
from schedules import SITES, Chain

from pyro_bpq import AllAction, CriticLearner, Replay, TraceBackpropQ_ELBO


def exact_q(chain: Chain) -> list[torch.Tensor]:
    """For every site the expected costs after it, by its value."""
    value, found = chain.cost, [chain.cost]
    for t in reversed(range(1, SITES)):
        log_q = (chain.start[t] + pyro.param("shift").detach()[t]).log_softmax(-1)
        value = (log_q.exp() * (log_q + math.log(log_q.shape[-1]) + value)).sum(-1)
        found.insert(0, value)
    return found


def critic_error(chain: Chain, elbo: TraceBackpropQ_ELBO, draws: int = 50) -> float:
    """Mean squared error of the critics where the guide goes."""
    elbo.eval()
    exact, total = exact_q(chain), 0.0
    for _ in range(draws):
        program = (chain.model, chain.guide, (), {})
        run = elbo.run_program(program)
        signals = elbo.stage([run], [program]).signals
        values, _ = signals.q_values
        for g, critic in signals.critics.items():
            for node, value in zip(critic.group.nodes, values[g].detach(), strict=True):
                found = exact[int(node.site.removeprefix("z"))][run.run.sites[node.site].value]
                total += float((value - found).square().sum()) / (SITES * draws)
    return total


def unlocked_update(elbo: TraceBackpropQ_ELBO, writes: threading.Lock) -> None:
    """An update that locks nothing but what it writes."""
    gradients = elbo.trainer.replayer.gradients(elbo)
    with writes:
        elbo.trainer.optimizer.step(elbo.critics, gradients)


class Background(threading.Thread):
    """Repeats an update until it is told to stop, or until it fails."""

    def __init__(self, update: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.update, self.updates, self.failure, self.stopped = update, 0, "", False

    def run(self) -> None:
        while not self.stopped:
            try:
                self.update()
            except Exception as error:
                self.failure = f"{type(error).__name__} in the thread"
                return
            self.updates += 1
            time.sleep(0.0)


def trial(variant: str, seed: int, seconds: float) -> dict[str, Any]:
    pyro.clear_param_store()
    pyro.get_param_store()
    pyro.set_rng_seed(seed)
    chain, lock = Chain(), threading.Lock()
    in_line = 1 if variant == "in line" else 0
    learner = CriticLearner(lr=0.03, replay=Replay(capacity=64, batch_size=4, updates_per_step=in_line))
    elbo = TraceBackpropQ_ELBO(seed=seed, lam=0.9, learner=learner, estimator=AllAction(exact=False))
    svi = SVI(chain.model, chain.guide, Adam({"lr": 0.0}), elbo)
    for _ in range(5):
        svi.step()
    thread = None
    if variant.startswith("thread"):

        def take_turns() -> None:
            with lock:
                elbo.replay()

        thread = Background(take_turns if "turns" in variant else lambda: unlocked_update(elbo, lock))
    start, steps, failure = time.perf_counter(), 0, ""
    if thread is not None:
        thread.start()
    while time.perf_counter() - start < seconds and not failure:
        try:
            if thread is None:
                svi.step()
            else:
                with lock:
                    svi.step()
        except Exception as error:
            failure = f"{type(error).__name__} in the step"
        steps += 1
        # A thread that waits for a lock gets it only if the other one lets go for a moment.
        time.sleep(0.0)
        failure = failure or ("" if thread is None else thread.failure)
    taken = time.perf_counter() - start
    if thread is not None:
        thread.stopped = True
        thread.join()
    updates = thread.updates if thread is not None else steps * in_line
    pyro.poutine.runtime._PYRO_STACK.clear()
    row = {"replay": variant, "seed": seed, "steps/s": steps / taken, "updates/s": updates / taken}
    if failure:
        return {**row, "critic error": math.nan, "failed": f"{failure}, step {steps}"}
    return {**row, "critic error": critic_error(chain, elbo), "failed": ""}


VARIANTS = ("none", "in line", "thread, in turns", "thread, writes locked")


def main() -> None:
    chosen = arguments(__doc__)
    seconds, seeds = (1.0, 1) if chosen.smoke else (20.0, 3) if chosen.full else (6.0, 2)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    rows = [trial(variant, seed, seconds) for seed in range(chosen.seeds or seeds) for variant in VARIANTS]
    write_csv(chosen.output / "background.csv", rows)
    text = f"{seconds:.0f} seconds each; mean squared error of the critics in nats²."
    write_markdown(chosen.output / "background.md", "Replay in a background thread", [text, table(rows)])
    print(table(rows))


if __name__ == "__main__":
    main()
